"""moe_experts sites: modules that hold all experts' weights in two three-dimensional parameters."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from veomni_core.ops.moe_experts import CONTRACTS
from veomni_core.sites import probe
from veomni_core.sites.site import AttributeChange, Change, Kernel, Site

_TINY_SIZES = (4, 6, 10)


class ExpertsModules:
    """Finds experts by running their own eager code on tiny weights, and replaces their ``forward``."""

    def find(self, model: nn.Module, rule: str) -> Iterable[Site]:
        proofs: dict[Any, tuple[str | None, str]] = {}
        for path, module in model.named_modules():
            weights = [module._parameters.get(name) for name in ("gate_up_proj", "down_proj")]
            if any(weight is None or weight.dim() != 3 for weight in weights):
                continue
            key = probe.behaviour(module)
            if key not in proofs:
                proofs[key] = _prove(module)
            yield Site("moe_experts", path, rule, *proofs[key], probe.parameter_dtype(module))

    def install(self, model: nn.Module, site: Site, kernel: Kernel | None) -> Iterable[Change]:
        assert kernel is not None
        module = model.get_submodule(site.path)
        yield AttributeChange(module, "forward", MethodType(_experts(kernel), module))


def _experts(kernel: Kernel) -> Kernel:
    def forward(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return kernel(hidden_states, top_k_index, top_k_weights, self.gate_up_proj, self.down_proj)  # type: ignore[no-any-return]

    return forward


def _prove(module: nn.Module) -> tuple[str | None, str]:
    extra = [name for name in module._parameters if name not in ("gate_up_proj", "down_proj")]
    if extra or module._buffers:
        return None, f"has further tensors: {', '.join([*extra, *module._buffers])}"
    experts, hidden, intermediate = module._parameters["down_proj"].shape  # type: ignore[union-attr]
    if tuple(module._parameters["gate_up_proj"].shape) != (experts, 2 * intermediate, hidden):  # type: ignore[union-attr]
        return None, "the weights are not laid out as [E, 2I, H] and [E, H, I]"
    with probe.seeded():
        sizes = dict(zip(dict.fromkeys((experts, hidden, intermediate)), _TINY_SIZES, strict=False))
        e, h, i = sizes[experts], sizes[hidden], sizes[intermediate]
        twin = probe.bare_copy(module)
        twin._modules.update(module._modules)
        probe.resize_attributes(twin, sizes)
        if "config" in vars(twin):
            config: Any = copy.copy(module.config)
            config._experts_implementation = "eager"
            twin.config = config
        gate_up, down = probe.random(e, 2 * i, h).requires_grad_(), probe.random(e, h, i).requires_grad_()
        twin._parameters.update(gate_up_proj=gate_up, down_proj=down)  # type: ignore[call-overload]
        twin.training = True
        x = probe.random(9, h).requires_grad_()
        index = torch.stack([torch.randperm(e)[:2] for _ in range(9)])
        weights = torch.rand(9, 2).requires_grad_()
        found, error = probe.attempt(lambda: type(module).forward(twin, x, index, weights))
        if error:
            return None, error
        return _match(found, x, index, weights, gate_up, down)


def _match(
    found: Any, x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
) -> tuple[str | None, str]:
    if not isinstance(found, Tensor):
        return None, f"gives a {type(found).__name__}, expected a tensor"
    misses = []
    for variant, contract in CONTRACTS.items():
        wanted = contract.reference(x, index, weights, gate_up, down)
        if probe.close(found, wanted) and probe.gradients_close(found, wanted, (x, weights, gate_up, down)):
            return variant, "its own code gave the reference's values and gradients, the router's too"
        misses.append((probe.largest_miss(found, wanted), variant))
    by_how_much, nearest = min(misses)
    return None, f"no variant fits; the nearest, {nearest}, misses by {by_how_much:.1%}"
