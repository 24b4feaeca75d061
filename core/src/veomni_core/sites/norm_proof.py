"""How a norm is proven: what rounding tells apart must agree bit for bit, and gradients in float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from veomni_core.sites import probe

Inputs = tuple[Tensor | None, ...]
# Inputs of a norm from the dtype of its input, the dtype of its weight, and the scale of its input.
Draw = Callable[[torch.dtype, torch.dtype, float], Inputs]
_EPS_NAMES = ("variance_epsilon", "eps", "epsilon", "norm_eps", "layer_norm_eps", "rms_norm_eps")
# Rounding tells the variants apart, and only in these two pairs of (input, weight) dtypes: in float32 Llama's and
# OLMo 2's norms are equal, and with a bf16 weight so are several casts of it.
_EXACT_PAIRS = ((torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32))


def eps_of(module: nn.Module) -> float | None:
    """The number under the module's root, by the attributes that models keep it in."""
    values = (vars(module).get(name) for name in _EPS_NAMES)
    return next((value for value in values if isinstance(value, float)), None)


def prove_norm(
    own: Callable[..., Any], references: Mapping[str, Callable[..., Tensor]], draw: Draw, eps: float
) -> tuple[str | None, str]:
    """The variant whose reference computes what ``own`` does on drawn inputs, and the evidence."""
    tried = []
    with probe.seeded():
        for variant, reference in references.items():
            why_not = _mismatch(own, reference, draw, eps)
            if not why_not:
                return variant, "its own code gave the reference's bits in bf16 and its gradients in float32"
            tried.append(f"{variant}: {why_not}")
    return None, "; ".join(tried)


def _mismatch(own: Callable[..., Any], reference: Callable[..., Tensor], draw: Draw, eps: float) -> str:
    for x_dtype, weight_dtype in _EXACT_PAIRS:
        # Small values as well as large, so that an eps which is read from the wrong place shows.
        for scale in (3.0, eps**0.5):
            inputs = draw(x_dtype, weight_dtype, scale)
            found, error = probe.attempt(partial(own, *inputs))
            if error:
                return error
            wanted = reference(*inputs)
            if not isinstance(found, Tensor) or found.dtype != wanted.dtype:
                return f"gives {getattr(found, 'dtype', type(found).__name__)} for {x_dtype}, expected {wanted.dtype}"
            if share := _share_differing(found, wanted):
                return f"{share:.0%} of elements differ for {x_dtype} with a {weight_dtype} weight"
    inputs = draw(torch.float32, torch.float32, 1.0)
    differentiable = [tensor.requires_grad_() for tensor in inputs if tensor is not None]
    same = probe.gradients_close(own(*inputs), reference(*inputs), differentiable)
    return "" if same else "gradients differ in float32"


def _share_differing(a: Tensor, b: Tensor) -> float:
    """The share of elements that differ; all of them where the shapes do."""
    return 1.0 if a.shape != b.shape else float((a != b).double().mean())
