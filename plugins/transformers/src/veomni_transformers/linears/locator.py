"""linear sites: torch's linear modules, and modules that multiply by a weight of their own, as routers do.

The latter call ``F.linear``. Their forward is cloned, and its clone sees a namespace whose ``linear`` is the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from veomni_core.changes.change import Change, ForwardChange, setter_of
from veomni_core.descriptions.kernel_spec import KernelSpec
from veomni_core.sites.site import Kernel, Site
from veomni_ops.linear import CONTRACTS
from veomni_transformers.engine.engine_layout import EngineLayout
from veomni_transformers.engine.layout import refused
from veomni_transformers.proving import probe
from veomni_transformers.proving.code_reading import why_not_clonable
from veomni_transformers.proving.functions import code_layers, with_globals
from veomni_transformers.proving.module_locator import ModuleLocator
from veomni_transformers.proving.proof import Proof

_FUNCTIONAL = "F"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # quantised weights are multiplied otherwise
_PROVEN = Proof("standard", "its own code, with the reference as its only product, gave its values")
_TOKENS, _SMALL = 11, (37, 23)  # of the linear on which torch's forward is run


class LinearModules(ModuleLocator):
    """Finds linears and routers, and gives their products to a kernel.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.GELU())
        >>> [(site.path, site.variant) for site in LinearModules().find(model, "linear modules")]
        [('0', 'standard')]
    """

    op_name = "linear"

    def is_candidate(self, module: nn.Module) -> bool:
        return _is_torchs(module) or _multiplies(module)

    def key(self, module: nn.Module) -> Hashable:
        if not _is_torchs(module):
            return super().key(module)
        return (nn.Linear, module.bias is None, setter_of(module))

    def prove(self, module: nn.Module) -> Proof | None:
        if setter := setter_of(module):
            return Proof(None, f"its forward was set on the instance: it was {setter}")
        return _prove_torchs(module) if _is_torchs(module) else _prove_own(module)

    def sizes(self, module: nn.Module) -> Mapping[str, tuple[int, ...]]:
        weight: Any = module.weight
        return {"inputs": (weight.shape[1],), "outputs": (weight.shape[0],)}

    def sharded(self, site: Site, layout: EngineLayout) -> Site:
        styles = layout.styles_at(site.path)
        return refused(site, styles, "the kernel takes plain tensors with the whole weight") if styles else site

    def install(self, model: nn.Module, site: Site, kernel: Kernel, spec: KernelSpec) -> Iterable[Change]:
        module = model.get_submodule(site.path)
        yield ForwardChange(module, _of_linear(kernel) if _is_torchs(module) else _cloned(module, kernel))


def _is_torchs(module: nn.Module) -> bool:
    # The other class is that of MultiheadAttention's output, whose weight is read and whose forward is never called.
    return (
        isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and not isinstance(module, NonDynamicallyQuantizableLinear)
    )


def _multiplies(module: nn.Module) -> bool:
    """Whether the module's own code names ``F.linear`` and its weight, and has no children that may do so too."""
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 2 or module._modules or weight.dtype not in _DTYPES:
        return False
    layers = [each for each in code_layers(type(module).forward) if each.__globals__.get(_FUNCTIONAL) is F]
    return any({"linear", "weight"} <= {*layer.__code__.co_names} for layer in layers)


def _of_linear(kernel: Kernel) -> Callable[..., Tensor]:
    def forward(self: Any, input: Tensor) -> Tensor:
        return kernel(input, self.weight, self.bias)  # type: ignore[no-any-return]

    return forward


def _cloned(module: nn.Module, kernel: Kernel) -> Callable[..., Any]:
    functional = ModuleType(F.__name__)
    vars(functional).update({**vars(F), "linear": kernel})
    return with_globals(type(module).forward, {_FUNCTIONAL: functional})


def _prove_torchs(module: nn.Module) -> Proof:
    with probe.seeded():
        linear: Any = probe.bare_copy(module)
        linear._parameters["weight"] = nn.Parameter(probe.random(*_SMALL))
        if module.bias is not None:
            linear._parameters["bias"] = nn.Parameter(probe.random(_SMALL[0]))
        x = probe.random(_TOKENS, _SMALL[1]).requires_grad_()
        wanted = CONTRACTS["standard"].reference(x, linear.weight, linear.bias)
        if miss := probe.miss(type(module).forward(linear, x), wanted, [x, linear.weight]):
            return Proof(None, f"torch's linear misses standard by {miss:.1%}")
    return Proof("standard", "its forward is torch's own, which gave the reference's values and gradients")


def _prove_own(module: nn.Module) -> Proof:
    """Run the module's own code in both modes, and its clone with the reference, which must be what multiplied."""
    if why_not := why_not_clonable(type(module).forward, [_FUNCTIONAL]):
        return Proof(None, why_not)
    proofs = [_prove_own_once(module, training) for training in (False, True)]
    return next((each for each in proofs if each.variant is None), _PROVEN)


def _prove_own_once(module: nn.Module, training: bool) -> Proof:
    calls = []

    def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        calls.append(weight.shape)
        return CONTRACTS["standard"].reference(x, weight, bias)  # type: ignore[no-any-return]

    with probe.seeded():
        twin = probe.bare_copy(module)
        twin.training = training
        for kind, tensors in (("_parameters", module._parameters), ("_buffers", module._buffers)):
            drawn = {n: None if t is None else probe.random(*t.shape) for n, t in tensors.items()}
            vars(twin)[kind].update({n: None if t is None else nn.Parameter(t) for n, t in drawn.items()})
        weight: Any = module.weight
        x = probe.random(_TOKENS, weight.shape[1])
        own, why_not = probe.attempt(lambda: type(module).forward(twin, x))
        cloned, why_not_cloned = probe.attempt(lambda: _cloned(module, reference)(twin, x))
        if why_not or why_not_cloned:
            return Proof(None, f"it raised when it was run alone: {why_not or why_not_cloned}", examined=False)
        if calls != [weight.shape]:
            return Proof(None, f"it multiplies {len(calls)} times, expected once, by its weight")
        pairs = zip(_tensors(own), _tensors(cloned), strict=True)
        if not all(a.equal(b) for a, b in pairs):
            return Proof(None, "with its product in the reference's place it gives other values")
    return _PROVEN


def _tensors(results: Any) -> list[Tensor]:
    return [each for each in (results if isinstance(results, tuple) else (results,)) if isinstance(each, Tensor)]
