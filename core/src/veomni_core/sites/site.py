"""What a site is, and what a rule that finds sites must be able to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from veomni_core.descriptions.kernel_spec import EAGER, KernelSpec
from veomni_core.descriptions.sharding import WHOLE, Sharding

if TYPE_CHECKING:  # planning from sites alone imports no torch
    from veomni_core.changes.change import Change

Kernel = Callable[..., Any]


@dataclass(frozen=True)
class Site:
    """A place in a model where an op happens.

    Attributes:
        op_name: the op that happens there.
        path: the module's path in the model; empty for the model itself.
        rule: the name of the rule that found the site.
        variant: the op's variant; ``None`` where no variant could be proven.
        evidence: how the variant was proven, or without a variant, what was tried.
        dtype: the dtype of the module's parameters, as configs write it.
        detail: what the rule needs to put a kernel there.
        sizes: the widths and counts that a kernel's ``can_run`` may look at, by the names in the op's documentation
            (for experts ``experts``, ``hidden`` and ``intermediate``). Each is a tuple, mostly of one: an attention
            site covers all layers that share a config, and their heads may differ in width. Where a rank computes with
            a part of the weights, they are the sizes of the ranks' parts.
        own: what runs there when nothing is bound: ``eager``, or the implementation that the model is set to.
        examined: whether what the site computes could be determined. With ``variant=None``, True means that it matches
            no known variant, and False that we could not tell.
        needs: the features that a kernel must declare to run there.
        refuses: the features that a kernel must not declare to run there, each with the reason.
        declared: whether the variant is only stated (by an ``OpSlot``, a plugin's rule or transformers), not proven.
        sharding: over how many ranks the site's parameters are divided.
        left_out: what the proof leaves out for kernels that declare a feature, by the feature; under "" for all of
            them. Plan and receipt show it where such a kernel is bound.

    Example:
        >>> site = Site("rms_norm", "model.norm", "norm modules", "standard", "proven by value", sizes={"width": [97]})
        >>> site.own, site.declared
        ('eager', False)
        >>> def can_run(site):  # as a KernelSpec's can_run names it
        ...     (width,) = site.sizes["width"]
        ...     return f"needs a width that is a multiple of 8, not {width}" if width % 8 else ""
        >>> can_run(site)
        'needs a width that is a multiple of 8, not 97'
    """

    op_name: str
    path: str
    rule: str
    variant: str | None
    evidence: str
    dtype: str | None = None
    detail: Mapping[str, Any] = field(default_factory=dict)
    own: str = EAGER
    examined: bool = True
    needs: tuple[str, ...] = ()
    refuses: Mapping[str, str] = field(default_factory=dict)
    declared: bool = False
    sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    sharding: Sharding = WHOLE
    left_out: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.sharding, Mapping):  # as a plan's JSON has it
            object.__setattr__(self, "sharding", Sharding(**self.sharding))
        object.__setattr__(self, "needs", tuple(self.needs))
        object.__setattr__(self, "sizes", {name: tuple(sizes) for name, sizes in self.sizes.items()})

    def left_out_of(self, spec: KernelSpec) -> tuple[str, ...]:
        """What the proof leaves out for the kernel of ``spec``."""
        return tuple(what for feature, what in self.left_out.items() if feature in ("", *spec.features))


class SiteLocator(Protocol):
    """Finds the sites of one rule, and puts kernels there.

    A kernel stands in for the ``forward`` of its site's module. A locator that knows better has a method
    ``code_read(model, site)``, which gives a :class:`~veomni_core.changes.code_places.CodePlace` for each piece of code
    that its proof has read; sites with the same code share one tuple.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from veomni_core.authoring import ForwardChange
        >>> class GeluModules:
        ...     def find(self, model, rule):
        ...         for path, module in model.named_modules():
        ...             if isinstance(module, nn.GELU) and module.approximate == "tanh":
        ...                 yield Site("gelu", path, rule, "tanh", "its class and its setting say so")
        ...
        ...     def install(self, model, site, kernel, spec):
        ...         yield ForwardChange(model.get_submodule(site.path), lambda self, input: kernel(input))
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.GELU("tanh"), nn.GELU())
        >>> [site] = GeluModules().find(model, "GELU modules")
        >>> site.path
        '1'
        >>> [change] = GeluModules().install(model, site, torch.relu, None)  # a kernel that is easy to tell apart
        >>> change.apply()
        >>> model[1](torch.tensor([-1.0, 1.0])), model[2](torch.tensor([-1.0, 1.0]))
        (tensor([0., 1.]), tensor([-0.1587,  0.8413]))
    """

    def find(self, model: Any, rule: str) -> Iterable[Site]:
        """The sites in ``model``. The model is only read: it is not changed, and its weights are not computed on."""

    def install(self, model: Any, site: Site, kernel: Kernel, spec: KernelSpec) -> Iterable[Change]:
        """The changes that make ``kernel``, loaded from ``spec``, run at ``site``.

        The caller applies each change as it is yielded.
        """


@runtime_checkable
class EagerSiteLocator(SiteLocator, Protocol):
    """The locator of a rule with ``installs_eager``: at its sites, the choice ``eager`` also needs changes.

    Example:
        >>> from torch import nn
        >>> from veomni_core.authoring import AttributeChange, ForwardChange
        >>> class Gelus:
        ...     def find(self, model, rule):
        ...         yield Site("gelu", "0", rule, "tanh", "its class says so", own=model[0].implementation)
        ...
        ...     def install(self, model, site, kernel, spec):
        ...         yield ForwardChange(model[0], lambda self, input: kernel(input))
        ...
        ...     def install_eager(self, model, site):
        ...         yield AttributeChange(model[0], "implementation", "eager")
        >>> isinstance(Gelus(), EagerSiteLocator)  # so a SiteRule of it may say installs_eager=True
        True
        >>> model = nn.Sequential(nn.GELU())
        >>> model[0].implementation = "compiled"  # what the model is set to
        >>> [change] = Gelus().install_eager(model, next(Gelus().find(model, "GELU modules")))
        >>> change.apply()
        >>> model[0].implementation
        'eager'
    """

    def install_eager(self, model: Any, site: Site) -> Iterable[Change]:
        """The changes that make the op's eager code run at ``site``, whatever the model is set to."""
