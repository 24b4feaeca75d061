"""What the files of planted faults share: right code that each spoils, a wrong gradient, and how faults are sought."""

from __future__ import annotations

import inspect

import torch
from torch.autograd import Function

from veomni_conformance import check_kernel
from veomni_core import KernelSpec
from veomni_ops.contract import Size


def derivatives(gate, up, upstream):
    """The gradients of ``silu(gate) * up``."""
    gate, up, upstream = gate.float(), up.float(), upstream.float()
    sigmoid = torch.sigmoid(gate)
    return upstream * up * sigmoid * (1 + gate * (1 - sigmoid)), upstream * gate * sigmoid


class SwiGLU(Function):
    """A right one, with a backward of its own."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return torch.nn.functional.silu(gate) * up

    @staticmethod
    def backward(ctx, upstream):
        gate, up = ctx.saved_tensors
        if torch.is_grad_enabled():
            raise RuntimeError("no second derivatives")
        dgate, dup = derivatives(gate, up, upstream)
        return dgate.to(gate.dtype), dup.to(up.dtype)


def right(gate, up):
    return SwiGLU.apply(gate, up)


class WrongGradient(Function):
    """Multiplies one input's gradient."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, upstream):
        return upstream * ctx.factor, None


def failures_of(
    kernel, op="swiglu_mlp", variant="standard", dtype="float32", largest=Size.SMALL, fail_fast=False, **options
):
    """The sentences of the check's report."""
    module = inspect.getmodule(kernel).__name__
    spec = KernelSpec(kernel.__name__, op, variant, f"{module}:{kernel.__name__}", **options)
    return check_kernel(spec, "cpu", dtype, largest=largest, fail_fast=fail_fast).failures


def assert_caught(kernel, words, **options):
    """Assert that a failure of the kernel has these words. It is usually the first, after which the rest takes long."""
    failures = failures_of(kernel, fail_fast=True, **options)
    if not any(words in failure for failure in failures):
        failures = failures_of(kernel, **options)
    assert any(words in failure for failure in failures), f"{words!r} is not in {failures}"
