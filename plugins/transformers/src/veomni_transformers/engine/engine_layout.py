"""How the engine divides a model over ranks, and what a rule that finds sites may know of that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from veomni_core.descriptions.sharding import Sharding
from veomni_core.sites.site import Site, SiteLocator


@dataclass(frozen=True)
class EngineLayout:
    """How transformers' distributed engine divides a model: the number of ranks in each dimension, and its styles.

    A style (``colwise``, ``ep_dispatch_experts``, ...) says how one module or parameter is divided.

    Attributes:
        fsdp: ranks that read different batches, and shard each parameter between them.
        tp: ranks that read the same batch and divide the tensors of ``tp_styles``.
        ep: ranks that divide the experts of ``ep_styles``.
        tp_styles, ep_styles: the engine's styles, by the path of a module or parameter.
        ep_implementation: the engine's name of how tokens reach the experts' ranks.

    Example:
        >>> styles = {"mlp": "ep_dispatch_experts", "mlp.gate_up_proj": "grouped_gemm"}
        >>> layout = EngineLayout(fsdp=8, ep=4, ep_styles=styles)
        >>> str(layout.of("mlp")), str(layout.of("norm"))
        ('FSDP2 over 2, experts over 4', 'FSDP2 over 8')
        >>> layout.styles_at("mlp")
        {'': 'ep_dispatch_experts', 'gate_up_proj': 'grouped_gemm'}
    """

    fsdp: int = 1
    tp: int = 1
    ep: int = 1
    tp_styles: Mapping[str, str] = field(default_factory=dict)
    ep_styles: Mapping[str, str] = field(default_factory=dict)
    ep_implementation: str = "auto"

    def of(self, path: str) -> Sharding:
        """The sharding of the parameters at and below ``path``."""
        tp = self.tp if _any_at(self.tp_styles, path) else 1
        ep = self.ep if _any_at(self.ep_styles, path) else 1
        # Experts are sharded by the ranks that hold the same ones, other parameters by the ranks with other batches.
        fsdp = self.fsdp * self.tp // self.ep if path in self.ep_styles else self.fsdp
        return Sharding(fsdp, tp, ep)

    def styles_at(self, path: str) -> dict[str, str]:
        """The styles at and below ``path``, by relative path: that of the module itself is under ``""``."""
        styles = {**self.tp_styles, **self.ep_styles}
        return {each[len(path) :].lstrip("."): style for each, style in styles.items() if _is_at(each, path)}


@runtime_checkable
class ShardedSiteLocator(SiteLocator, Protocol):
    """A locator that knows its sites on models whose forward computes with a part of the weights.

    transformers' distributed engine divides weights over the ranks of tensor and expert parallelism. A site is found on
    the whole model, and then passed to :meth:`sharded`. At the sites of a locator without that method, no kernel is
    bound where weights are divided.

    Example:
        >>> from dataclasses import replace
        >>> class GeluModules:
        ...     def find(self, model, rule):
        ...         yield Site("gelu", "mlp.act", rule, "tanh", "its class says so", sizes={"width": (96,)})
        ...
        ...     def install(self, model, site, kernel, spec):
        ...         yield from ()
        ...
        ...     def sharded(self, site, layout):  # it is between linears whose tensors are divided
        ...         return replace(site, sizes={"width": (site.sizes["width"][0] // layout.tp,)})
        >>> isinstance(GeluModules(), ShardedSiteLocator)
        True
        >>> [site] = GeluModules().find(None, "GELU modules")
        >>> GeluModules().sharded(site, EngineLayout(tp=2)).sizes
        {'width': (48,)}
    """

    def sharded(self, site: Site, layout: EngineLayout) -> Site:
        """What ``site``, found on the whole model, is under ``layout``.

        It has the sizes of the ranks' parts, or another variant, or no variant and why no kernel can run there.
        """


@runtime_checkable
class DividedSiteLocator(SiteLocator, Protocol):
    """A locator of sites that a whole model doesn't have: they come from how the engine divides it.

    Example:
        >>> class Gathers:
        ...     def find(self, model, rule):
        ...         return ()
        ...
        ...     def find_divided(self, model, layout, rule):
        ...         for path, style in layout.tp_styles.items():
        ...             if style == "colwise_gather_output":
        ...                 yield Site("gather", path, rule, "last_dimension", "the engine's plan", declared=True)
        ...
        ...     def install(self, model, site, kernel, spec):
        ...         yield from ()
        >>> isinstance(Gathers(), DividedSiteLocator)
        True
        >>> layout = EngineLayout(tp=2, tp_styles={"lm_head": "colwise_gather_output"})
        >>> [site.path for site in Gathers().find_divided(None, layout, "gathers")]
        ['lm_head']
    """

    def find_divided(self, model: Any, layout: EngineLayout, rule: str) -> Iterable[Site]:
        """The sites of ``model``, which is whole and on the meta device, once the engine divides it by ``layout``."""


def parts(size: int, ranks: int) -> tuple[int, ...]:
    """The different sizes of the ranks' parts of a dimension, the largest first; the last parts may be shorter.

    Example:
        >>> parts(96, 2), parts(101, 4), parts(5, 4)
        ((48,), (26, 23), (2, 1, 0))
    """
    largest = -(-size // ranks)
    return tuple(dict.fromkeys(min(largest, max(0, size - rank * largest)) for rank in range(ranks)))


def _any_at(styles: Mapping[str, str], path: str) -> bool:
    return any(_is_at(each, path) for each in styles)


def _is_at(each: str, path: str) -> bool:
    return not path or each == path or each.startswith(f"{path}.")
