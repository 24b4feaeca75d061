"""Finds GELU modules in a model, proves what they compute, and puts kernels there."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from transformers.activations import GELUTanh, NewGELUActivation

from acme_gelu.contract import tanh
from veomni_core import KernelSpec
from veomni_core.authoring import Change, ForwardChange, Kernel, Site
from veomni_transformers.authoring import ModuleLocator, Proof, probe


class GeluModules(ModuleLocator):
    """transformers' two spellings of the tanh GELU; one that computes anything else stays eager."""

    op_name = "gelu"

    def is_candidate(self, module: nn.Module) -> bool:
        return isinstance(module, (NewGELUActivation, GELUTanh))

    def prove(self, module: nn.Module) -> Proof:
        name, miss = type(module).__name__, _miss(module)
        return Proof(None, f"{name} misses tanh by {miss:.1%}") if miss else Proof("tanh", f"{name} is tanh")

    def install(self, model: nn.Module, site: Site, kernel: Kernel, spec: KernelSpec) -> Iterable[Change]:
        def forward(self: nn.Module, input: Tensor) -> Tensor:
            return kernel(input)  # type: ignore[no-any-return]

        yield ForwardChange(model.get_submodule(site.path), forward)


def _miss(module: nn.Module) -> float:
    """The share by which values, gradients or bfloat16's bits of the module's own code differ from the contract's."""
    with probe.seeded():
        copy = probe.full_copy(module)  # models may be on the meta device and in bfloat16
        x = probe.random(7, 33, scale=4.0).requires_grad_()
        rounded = probe.random(7, 33, dtype=torch.bfloat16, scale=4.0)
        return max(
            probe.miss(copy.float()(x), tanh(x), [x]),
            probe.rounded_miss(copy.bfloat16()(rounded), tanh(rounded)),
        )
