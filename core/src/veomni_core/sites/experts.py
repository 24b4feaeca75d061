"""moe_experts sites: modules that hold all experts' weights in two three-dimensional parameters.

A site is proven by running the module's own eager code on tiny weights, and each layout's forward with the reference on
the same ones.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from veomni_core.changes import Change, ForwardChange
from veomni_core.ops.moe_experts import CONTRACTS
from veomni_core.sites import probe
from veomni_core.sites.expert_layouts import LAYOUTS, Forward
from veomni_core.sites.experts_selection import EagerExpertsChange, is_dispatched, selected_implementation
from veomni_core.sites.site import Kernel, Site

_WEIGHTS = ("gate_up_proj", "down_proj")
_KNOWN = (*_WEIGHTS, "gate_up_proj_bias", "down_proj_bias")


class ExpertsModules:
    """Finds experts, and replaces their ``forward`` by their layout's."""

    def find(self, model: nn.Module, rule: str) -> Iterable[Site]:
        proofs: dict[Any, tuple[str | None, str, str]] = {}
        for path, module in model.named_modules():
            weights = [module._parameters.get(name) for name in _WEIGHTS]
            if any(weight is None or weight.dim() != 3 for weight in weights):
                continue
            key = probe.behaviour(module)
            if key not in proofs:
                proofs[key] = _prove(module)
            variant, evidence, layout = proofs[key]
            dtype, detail, own = probe.parameter_dtype(module), {"layout": layout}, selected_implementation(module)
            yield Site("moe_experts", path, rule, variant, evidence, dtype, detail, own)

    def install(self, model: nn.Module, site: Site, kernel: Kernel | None) -> Iterable[Change]:
        module = model.get_submodule(site.path)
        if kernel is not None:
            yield ForwardChange(module, LAYOUTS[site.detail["layout"]].forward_with(kernel))
        elif is_dispatched(module):
            yield EagerExpertsChange(module)


def _prove(module: nn.Module) -> tuple[str | None, str, str]:
    """Variant, evidence and layout."""
    sizes, why_not = _tiny_sizes(module)
    if sizes is None:
        return None, why_not, ""
    with probe.seeded():
        twin = _twin(module, sizes)
        calls = [_inputs(twin, sizes, scale) for scale in probe.SCALES]
        own, error = probe.attempt(lambda: [type(module).forward(twin, *inputs) for inputs in calls])
        if error:
            return None, error, ""
        if not all(isinstance(found, Tensor) for found in own):
            return None, f"gives a {type(own[0]).__name__}, expected a tensor", ""
        misses = []
        for name, layout in LAYOUTS.items():
            forward = layout.forward_with(CONTRACTS[layout.variant].reference)
            miss = max(map(partial(_miss, twin, forward), calls, own))
            if miss == 0.0:
                evidence = f"{name}: its own code gave the reference's values and gradients, router included"
                return layout.variant, evidence, name
            misses.append((miss, f"{layout.variant} {name}"))
    by_how_much, nearest = min(misses)
    if by_how_much == float("inf"):
        return None, "its weights and its call fit no layout that is known", ""
    return None, f"no variant fits; the nearest, {nearest}, misses by {by_how_much:.1%}", ""


def _miss(twin: nn.Module, forward: Forward, inputs: tuple[Tensor, ...], found: Tensor) -> float:
    wanted, error = probe.attempt(partial(forward, twin, *inputs))
    if error:
        return float("inf")
    return probe.miss(found, wanted, [tensor for tensor in (*inputs, *twin.parameters()) if tensor.requires_grad])


@dataclass(frozen=True)
class _TinySizes:
    """The sizes of a tiny copy's weights; ``of`` gives the tiny size of each real one."""

    gate_up_experts: int
    down_experts: int
    hidden: int
    intermediate: int
    transposed: bool
    of: dict[int, int]

    def shape(self, name: str) -> tuple[int, ...]:
        """The tiny shape of the parameter of that name."""
        gate_up, down = (2 * self.intermediate, self.hidden), (self.hidden, self.intermediate)
        shapes = {
            "gate_up_proj": (self.gate_up_experts, *(gate_up[::-1] if self.transposed else gate_up)),
            "down_proj": (self.down_experts, *(down[::-1] if self.transposed else down)),
            "gate_up_proj_bias": (self.gate_up_experts, 2 * self.intermediate),
            "down_proj_bias": (self.down_experts, self.hidden),
        }
        return shapes[name]


def _tiny_sizes(module: nn.Module) -> tuple[_TinySizes | None, str]:
    """The sizes, or ``None`` and why the module's tensors are not those of gated experts."""
    tensors = {name: value.shape for name, value in module._parameters.items() if value is not None}
    further = [name for name in (*tensors, *module._buffers) if name not in _KNOWN]
    if further:
        return None, f"has further tensors: {', '.join(further)}"
    gate_up, down = tensors["gate_up_proj"], tensors["down_proj"]
    as_stored = gate_up[1:] == (2 * down[2], down[1])
    if not as_stored and gate_up[1:] != (down[2], 2 * down[1]):
        return None, f"weights of shapes {tuple(gate_up)} and {tuple(down)} are no gated experts, transposed or not"
    hidden, intermediate = down[1:] if as_stored else down[:0:-1]
    tiny_intermediate, experts = 10, 4
    # Sizes that are equal stay equal.
    tiny_hidden = {intermediate: tiny_intermediate, 2 * intermediate: 2 * tiny_intermediate}.get(hidden, 6)
    gate_up_experts = experts if gate_up[0] <= down[0] else experts + 2
    of = {gate_up[0]: gate_up_experts, down[0]: experts, intermediate: tiny_intermediate, hidden: tiny_hidden}
    return _TinySizes(gate_up_experts, experts, tiny_hidden, tiny_intermediate, not as_stored, of), ""


def _twin(module: nn.Module, sizes: _TinySizes) -> nn.Module:
    """The module's code over tiny random weights."""
    twin: Any = probe.bare_copy(module)
    twin._modules.update(module._modules)
    probe.resize_attributes(twin, sizes.of)
    if "config" in vars(twin):
        twin.config = copy.copy(module.config)
        twin.config._experts_implementation = "eager"
    for name, value in module._parameters.items():
        if value is not None:
            twin._parameters[name] = probe.random(*sizes.shape(name)).requires_grad_()
    return twin.train()  # type: ignore[no-any-return]


def _inputs(twin: nn.Module, sizes: _TinySizes, scale: float) -> tuple[Tensor, ...]:
    """Random routes over the experts in ``gate_up_proj``; hidden states alone where the call takes no more."""
    experts, hidden = sizes.gate_up_experts, sizes.hidden
    parameters = list(inspect.signature(type(twin).forward).parameters.values())[1:]
    if sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters) == 1:
        return (probe.random(3 * experts, hidden, scale=scale).requires_grad_(),)
    index = torch.stack([torch.randperm(experts)[:2] for _ in range(9)])
    return probe.random(9, hidden, scale=scale).requires_grad_(), index, torch.rand(9, 2).requires_grad_()
