"""rms_norm/log_weight: ``(x[..., H], weight[H], eps) -> [..., H]``, a root-mean-square norm scaled by ``exp(weight)``.

A weight of zeros scales by one, and no weight can turn a sign around.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from veomni_conformance import compute_dtype
from veomni_core import KernelSpec
from veomni_core.authoring import Change, ForwardChange, Kernel, Site
from veomni_ops.rms_norm import CONTRACTS
from veomni_transformers.authoring import ModuleLocator, Proof, probe


def reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / rms(x) * exp(weight)``, computed in float32 and rounded once."""
    wide = x.to(compute_dtype(x))
    normalised = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (normalised * weight.to(wide.dtype).exp()).to(x.dtype)


# The samples and tolerances are those of the core's variant with a weight.
CONTRACT = replace(CONTRACTS["standard"], variant="log_weight", reference=reference, rounding={})


def factory(keep: str) -> Kernel:
    """The kernel. For backward it keeps the ``normalised`` rows, or the ``inputs`` to recompute them."""
    return kernel if keep == "normalised" else recomputed


def kernel(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As :func:`reference`, by PyTorch's own norm."""
    scale = weight.to(compute_dtype(x)).exp()
    return nn.functional.rms_norm(x.to(scale.dtype), x.shape[-1:], scale, eps).to(x.dtype)


def recomputed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """:func:`kernel`, run again in backward."""
    result: Tensor = checkpoint(kernel, x, weight, eps, use_reentrant=False)
    return result


class LogWeightRMSNorm(nn.Module):
    """A norm as a model of this family would have it."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.log_weight, self.eps = nn.Parameter(torch.zeros(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        variance = x.float().pow(2).mean(-1, keepdim=True)
        return (x.float() * torch.rsqrt(variance + self.eps) * self.log_weight.float().exp()).to(x.dtype)


class LogWeightNorms(ModuleLocator):
    """Finds these norms, and proves each kind by its own code."""

    op_name = "rms_norm"

    def is_candidate(self, module: nn.Module) -> bool:
        return isinstance(module, LogWeightRMSNorm)

    def prove(self, module: Any) -> Proof:
        miss = _miss(module)
        return Proof(None, f"log_weight: misses by {miss:.1%}") if miss else Proof("log_weight", "proven")

    def sizes(self, module: Any) -> Mapping[str, tuple[int, ...]]:
        return {"width": (module.log_weight.shape[0],)}

    def install(self, model: nn.Module, site: Site, kernel: Kernel, spec: KernelSpec) -> Iterable[Change]:
        def forward(self: nn.Module, x: Tensor) -> Tensor:
            return kernel(x, self.log_weight, +self.eps)  # type: ignore[no-any-return, operator]

        yield ForwardChange(model.get_submodule(site.path), forward)


def _miss(module: LogWeightRMSNorm) -> float:
    """By how much a small copy of ``module`` differs from the contract's reference, in values, gradients or bf16."""
    with probe.seeded():
        copy = type(module)(16, module.eps)
        nn.init.normal_(copy.log_weight)
        x, rounded = probe.random(5, 16).requires_grad_(), probe.random(5, 16, dtype=torch.bfloat16)
        inputs = [x, copy.log_weight]
        return max(
            probe.miss(copy(x), reference(x, copy.log_weight, copy.eps), inputs),
            probe.rounded_miss(copy(rounded), reference(rounded, copy.log_weight, copy.eps)),
        )
