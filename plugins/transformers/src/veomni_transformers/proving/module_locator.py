"""The walk over a model's modules, for ops that are one module each: every kind of module is proven once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Iterable, Mapping
from functools import partial

from torch import nn

from veomni_core.changes.change import Change
from veomni_core.descriptions.kernel_spec import EAGER, KernelSpec
from veomni_core.errors import SpecError
from veomni_core.sites.site import Kernel, Site
from veomni_core.sites.walk import named_modules
from veomni_transformers.proving import probe
from veomni_transformers.proving.code_read import Places, ReadsForward, code_of, module_at, words_of
from veomni_transformers.proving.code_reading import Readings, bypassed
from veomni_transformers.proving.proof import Proof, ProvenOnce


class ModuleLocator(ReadsForward, ABC):
    """Finds the modules in which the op ``op_name`` happens. A subclass says which modules these are, and proves them.

    Attributes:
        op_name: the op; set by the subclass.
        readings: a cache of what the code of each module class reads.

    Example:
        >>> from veomni_core.authoring import ForwardChange
        >>> def tanh(x):  # the reference of the op's variant of that name
        ...     return nn.functional.gelu(x, approximate="tanh")
        >>> class GeluModules(ModuleLocator):
        ...     op_name = "gelu"
        ...
        ...     def is_candidate(self, module):
        ...         return isinstance(module, nn.GELU)
        ...
        ...     def prove(self, module):
        ...         with probe.seeded():
        ...             x = probe.random(7, 33, scale=4.0).requires_grad_()
        ...             miss = probe.miss(module(x), tanh(x), [x])
        ...         return Proof(None, f"misses tanh by {miss:.2%}") if miss else Proof("tanh", "gave tanh's values")
        ...
        ...     def install(self, model, site, kernel, spec):
        ...         yield ForwardChange(model.get_submodule(site.path), lambda self, input: kernel(input))
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.GELU("tanh"), nn.GELU())
        >>> for site in GeluModules().find(model, "GELU modules"):
        ...     print(site.path, site.variant, site.evidence)
        1 tanh gave tanh's values
        2 None misses tanh by ...%
    """

    op_name: str

    def __init__(self) -> None:
        self.readings = Readings()

    @abstractmethod
    def is_candidate(self, module: nn.Module) -> bool:
        """Whether to prove ``module``; asked of every module, so it must be cheap and run nothing."""

    @abstractmethod
    def prove(self, module: nn.Module) -> Proof | None:
        """What ``module`` computes; ``None`` if it is not the op at all, so that it becomes no site."""

    @abstractmethod
    def install(self, model: nn.Module, site: Site, kernel: Kernel, spec: KernelSpec) -> Iterable[Change]:
        """As in :class:`~veomni_core.sites.site.SiteLocator`."""

    def key(self, module: nn.Module) -> Hashable:
        """What decides the behaviour of ``module``: modules with equal keys share one proof."""
        return probe.behaviour(module, self.readings.of(module).names)

    def sizes(self, module: nn.Module) -> Mapping[str, tuple[int, ...]]:
        """The widths and counts of ``module`` that a kernel's ``can_run`` may look at."""
        return {}

    def called(self, site: Site) -> Collection[str]:
        """The children and parameters that the forward of a bound module still calls or reads itself."""
        return ()

    def code_read(self, model: nn.Module, site: Site) -> Places:
        module = module_at(model, site.path)
        children, words = module.children(), words_of(module)
        alike = (site.variant, words, *code_of(module), *module._modules, *map(tuple, map(code_of, children)))
        known: dict[Hashable, Places] = vars(self).setdefault("_read_of_alike", {})
        if alike not in known:
            instead = (child for _, child in bypassed(module, self.readings.of(module), self.called(site)))
            known[alike] = self._places((code for each in (module, *instead) for code in code_of(each)), words=words)
        return known[alike]

    def own(self, module: nn.Module) -> str:
        """What runs in ``module`` while nothing is bound."""
        return EAGER

    def find(self, model: nn.Module, rule: str) -> Iterable[Site]:
        """A site for each candidate in ``model``."""
        proofs: ProvenOnce[Proof | None] = ProvenOnce()
        for path, module in named_modules(model):
            if not self.is_candidate(module):
                continue
            proof = proofs.of(self.key(module), partial(self.prove, module))
            if proof is not None:
                dtype, own, sizes = probe.parameter_dtype(module), self.own(module), self.sizes(module)
                yield proof.site(self.op_name, path, rule, dtype=dtype, own=own, sizes=sizes)


def refuse_empty(locator: ModuleLocator, name: str, entry: str) -> None:
    """Raise ``SpecError`` if the attribute ``name``, which maps names to what modules are compared with, is empty."""
    if not getattr(locator, name):
        raise SpecError(
            f"{type(locator).__name__}.{name} is empty, so there is nothing to compare modules with: write "
            f"{name} = {{{entry}, ...}}, or leave {name} out for the core's own"
        )
