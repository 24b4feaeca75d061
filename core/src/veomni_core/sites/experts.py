"""moe_experts sites: modules that hold all experts' weights in two three-dimensional parameters.

How such a module's call and weights become those of the contract is an adapter. A site is proven by running the
module's own eager code on tiny weights, and an adapter's forward with the reference on the same ones.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from veomni_core.ops.moe_experts import CONTRACTS
from veomni_core.sites import probe
from veomni_core.sites.site import AttributeChange, Change, Kernel, Site

Forward = Callable[..., Tensor]
# The large one reaches clamps, which released configs set at 7 to 20.
_SCALES = (1.0, 100.0)
_KNOWN = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")


def _as_stored(kernel: Kernel) -> Forward:
    """``gate_up_proj[E, 2I, H]`` and ``down_proj[E, H, I]``, as most families have them."""

    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return kernel(hidden_states, top_k_index, top_k_weights, self.gate_up_proj, self.down_proj)  # type: ignore[no-any-return]

    return forward


def _transposed(kernel: Kernel) -> Forward:
    """``gate_up_proj[E, H, 2I]`` and ``down_proj[E, I, H]`` (Aria)."""

    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        gate_up, down = self.gate_up_proj.transpose(1, 2), self.down_proj.transpose(1, 2)
        return kernel(hidden_states, top_k_index, top_k_weights, gate_up, down)  # type: ignore[no-any-return]

    return forward


def _one_block_per_expert(kernel: Kernel) -> Forward:
    """Transposed, and called with every expert's rows one after the other, already weighted (Llama 4)."""

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        gate_up, down = self.gate_up_proj.transpose(1, 2), self.down_proj.transpose(1, 2)
        rows, experts = hidden_states.reshape(-1, hidden_states.shape[-1]), gate_up.shape[0]
        index = torch.arange(experts, device=rows.device).repeat_interleave(rows.shape[0] // experts).unsqueeze(1)
        return kernel(rows, index, torch.ones_like(index, dtype=rows.dtype), gate_up, down)  # type: ignore[no-any-return]

    return forward


def _with_identities(kernel: Kernel) -> Forward:
    """As stored, with further experts beyond those in ``down_proj`` that give their input back (LongCat)."""

    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        experts = self.down_proj.shape[0]
        gate_up = self.gate_up_proj[:experts]
        routed = kernel(hidden_states, top_k_index, top_k_weights, gate_up, self.down_proj)
        kept = torch.where(top_k_index < experts, 0.0, top_k_weights).sum(dim=-1, keepdim=True)
        return routed + hidden_states * kept.to(hidden_states.dtype)  # type: ignore[no-any-return]

    return forward


def _clamped(kernel: Kernel) -> Forward:
    """gpt-oss's gate on weights as stored, without biases (MiniMax M3)."""

    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        weights = (self.gate_up_proj, self.down_proj, None, None)
        options = (self.swiglu_alpha, self.swiglu_limit, False)
        return kernel(hidden_states, top_k_index, top_k_weights, *weights, *options)  # type: ignore[no-any-return]

    return forward


def _clamped_silu(kernel: Kernel, limit: str) -> Forward:
    """SwiGLU of gate and up, clamped at the attribute ``limit``, on weights as stored (DeepSeek-V4)."""

    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        weights = (self.gate_up_proj, self.down_proj, None, None)
        return kernel(hidden_states, top_k_index, top_k_weights, *weights, 1.0, getattr(self, limit), False, 0.0)  # type: ignore[no-any-return]

    return forward


def _clamped_interleaved(kernel: Kernel) -> Forward:
    """gpt-oss: transposed, gate and up in turns, with biases."""

    def forward(self: Any, hidden_states: Tensor, router_indices: Tensor, routing_weights: Tensor) -> Tensor:
        weights = (self.gate_up_proj.transpose(1, 2), self.down_proj.transpose(1, 2))
        biases = (self.gate_up_proj_bias, self.down_proj_bias)
        return kernel(  # type: ignore[no-any-return]
            hidden_states, router_indices, routing_weights, *weights, *biases, self.alpha, self.limit, True
        )

    return forward


ADAPTERS: dict[str, tuple[str, Callable[[Kernel], Forward]]] = {
    "as stored": ("standard", _as_stored),
    "transposed": ("standard", _transposed),
    "one block per expert": ("standard", _one_block_per_expert),
    "with identities": ("standard", _with_identities),
    "clamped": ("clamped", _clamped),
    "clamped SwiGLU, limit": ("clamped", partial(_clamped_silu, limit="limit")),
    "clamped SwiGLU, swiglu_limit": ("clamped", partial(_clamped_silu, limit="swiglu_limit")),
    "clamped, interleaved": ("clamped", _clamped_interleaved),
}


class ExpertsModules:
    """Finds experts, and replaces their ``forward`` by an adapter's."""

    def find(self, model: nn.Module, rule: str) -> Iterable[Site]:
        proofs: dict[Any, tuple[str | None, str, str]] = {}
        for path, module in model.named_modules():
            weights = [module._parameters.get(name) for name in ("gate_up_proj", "down_proj")]
            if any(weight is None or weight.dim() != 3 for weight in weights):
                continue
            key = probe.behaviour(module)
            if key not in proofs:
                proofs[key] = _prove(module)
            variant, evidence, adapter = proofs[key]
            yield Site(
                "moe_experts", path, rule, variant, evidence, probe.parameter_dtype(module), {"adapter": adapter}
            )

    def install(self, model: nn.Module, site: Site, kernel: Kernel | None) -> Iterable[Change]:
        assert kernel is not None
        module = model.get_submodule(site.path)
        _, adapter = ADAPTERS[site.detail["adapter"]]
        yield AttributeChange(module, "forward", MethodType(adapter(kernel), module))


def _prove(module: nn.Module) -> tuple[str | None, str, str]:
    shapes, why_not = _tiny_shapes(module)
    if why_not:
        return None, why_not, ""
    with probe.seeded():
        twin = _twin(module, shapes)
        problems = [_inputs(twin, shapes, scale) for scale in _SCALES]
        own, error = probe.attempt(lambda: [type(module).forward(twin, *inputs) for inputs in problems])
        if error:
            return None, error, ""
        if not all(isinstance(found, Tensor) for found in own):
            return None, f"gives a {type(own[0]).__name__}, expected a tensor", ""
        misses = []
        for name, (variant, adapter) in ADAPTERS.items():
            miss = max(map(partial(_miss, twin, adapter(CONTRACTS[variant].reference)), problems, own))
            if miss == 0.0:
                return variant, f"{name}: its own code gave the reference's values and gradients, router included", name
            misses.append((miss, f"{variant} {name}"))
    by_how_much, nearest = min(misses)
    if by_how_much == float("inf"):
        return None, "its weights and its call fit no layout that is known", ""
    return None, f"no variant fits; the nearest, {nearest}, misses by {by_how_much:.1%}", ""


def _miss(twin: nn.Module, bound: Forward, inputs: tuple[Tensor, ...], found: Tensor) -> float:
    """How far an adapter's forward is from the module's own; 0 where values and all gradients agree."""
    wanted, error = probe.attempt(partial(bound, twin, *inputs))
    if error or wanted.shape != found.shape:
        return float("inf")
    differentiable = tuple(tensor for tensor in (*inputs, *twin.parameters()) if tensor.requires_grad)
    if probe.close(found, wanted) and probe.gradients_close(found, wanted, differentiable):
        return 0.0
    return max(probe.largest_miss(found, wanted), 1e-9)


def _tiny_shapes(module: nn.Module) -> tuple[dict[str, Any], str]:
    """Shapes for a tiny copy of the module's tensors, and under ``""`` the tiny size of each real one."""
    tensors = {name: value.shape for name, value in module._parameters.items() if value is not None}
    further = [name for name in (*tensors, *module._buffers) if name not in _KNOWN]
    if further:
        return {}, f"has further tensors: {', '.join(further)}"
    gate_up, down = tensors["gate_up_proj"], tensors["down_proj"]
    as_stored = gate_up[1:] == (2 * down[2], down[1])
    if not as_stored and gate_up[1:] != (down[2], 2 * down[1]):
        return {}, f"weights of shapes {tuple(gate_up)} and {tuple(down)} are no gated experts, transposed or not"
    hidden, intermediate = down[1:] if as_stored else down[:0:-1]
    i = 10
    h = {intermediate: i, 2 * intermediate: 2 * i}.get(hidden, 6)  # sizes that are equal stay equal
    e, all_e = 4, 4 + 2 * (gate_up[0] > down[0])
    shapes: dict[str, Any] = {
        "gate_up_proj": (all_e, 2 * i, h) if as_stored else (all_e, h, 2 * i),
        "down_proj": (e, h, i) if as_stored else (e, i, h),
        "gate_up_proj_bias": (all_e, 2 * i),
        "down_proj_bias": (e, h),
        "": {gate_up[0]: all_e, down[0]: e, intermediate: i, hidden: h},
    }
    return shapes, ""


def _twin(module: nn.Module, shapes: dict[str, Any]) -> nn.Module:
    """The module's code over tiny random weights."""
    twin: Any = probe.bare_copy(module)
    twin._modules.update(module._modules)
    probe.resize_attributes(twin, shapes[""])
    if "config" in vars(twin):
        twin.config = copy.copy(module.config)
        twin.config._experts_implementation = "eager"
    for name, value in module._parameters.items():
        if value is not None:
            twin._parameters[name] = probe.random(*shapes[name]).requires_grad_()
    return twin.train()  # type: ignore[no-any-return]


def _inputs(twin: nn.Module, shapes: dict[str, Any], scale: float) -> tuple[Tensor, ...]:
    """Random routes over the experts in ``gate_up_proj``; hidden states alone where the call takes no more."""
    experts, hidden = shapes["gate_up_proj"][0], shapes["down_proj_bias"][1]
    parameters = list(inspect.signature(type(twin).forward).parameters.values())[1:]
    if sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters) == 1:
        return (probe.random(3 * experts, hidden, scale=scale).requires_grad_(),)
    index = torch.stack([torch.randperm(experts)[:2] for _ in range(9)])
    return probe.random(9, hidden, scale=scale).requires_grad_(), index, torch.rand(9, 2).requires_grad_()
