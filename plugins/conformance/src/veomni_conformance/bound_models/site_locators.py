"""What a rule that finds sites may know of how they are called, for comparing a site with its module's own code."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, runtime_checkable

from veomni_core.descriptions.kernel_spec import KernelSpec
from veomni_core.sites.site import Site, SiteLocator


@runtime_checkable
class RequestedSiteLocator(SiteLocator, Protocol):
    """The locator of an op that is on request (:class:`veomni_core.OpSpec`), which a forward alone doesn't call.

    Example:
        >>> from veomni_transformers.losses.token_logprobs import TokenLogprobs
        >>> isinstance(TokenLogprobs(), RequestedSiteLocator)
        True
    """

    def run(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Ask ``module`` for what the op computes, on the arguments of its forward: a tensor or a tuple of them."""


@runtime_checkable
class SituatedSiteLocator(SiteLocator, Protocol):
    """The locator of an op that gets other arguments in some calls of a model than in training.

    Example:
        >>> from veomni_transformers.attention.locator import AttentionInterface
        >>> isinstance(AttentionInterface(), SituatedSiteLocator)  # with caches it gets other masks
        True
    """

    def situations(self, model: Any, site: Site, spec: KernelSpec) -> Iterable[tuple[str, Callable[[Any], Any]]]:
        """By name, functions of the site's module whose results ``verify=True`` compares beside those of training.

        Each gives a tensor or a tuple of them. One that raises on a model that is not bound is left out.
        """
