"""Finds GELU modules in a model, proves what they compute, and puts kernels there."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from transformers.activations import GELUTanh, NewGELUActivation

from acme_gelu.contract import tanh
from veomni_core.changes import Change, ForwardChange
from veomni_core.sites.site import Kernel, Site
from veomni_core.spec import KernelSpec


class GeluModules:
    """transformers' two spellings of the tanh GELU; one that computes anything else stays eager."""

    def find(self, model: nn.Module, rule: str) -> Iterable[Site]:
        for path, module in model.named_modules():
            if isinstance(module, (NewGELUActivation, GELUTanh)):
                x = torch.linspace(-6, 6, 101)
                miss = float((module(x) - tanh(x)).abs().max())
                variant = "tanh" if miss < 1e-6 else None
                yield Site("gelu", path, rule, variant, f"{type(module).__name__} misses tanh by {miss:.1e}")

    def install(self, model: nn.Module, site: Site, kernel: Kernel | None, spec: KernelSpec | None) -> Iterable[Change]:
        assert kernel is not None

        def forward(self: nn.Module, input: Tensor) -> Tensor:
            return kernel(input)  # type: ignore[no-any-return]

        yield ForwardChange(model.get_submodule(site.path), forward)
