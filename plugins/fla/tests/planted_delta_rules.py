"""In the place of fla's delta rule: one whose gradients of keys are off by half, as in fla#984, and a right one."""

from __future__ import annotations

import torch

from veomni_fla.delta_rules import adapted, even
from veomni_ops.chunk_gated_delta_rule import check_call, standard


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, key):
        return key.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 0.46 * gradient


def miscompiled():
    def library(q, k, v, g, beta, cu_seqlens_cpu=None, **options):
        return standard(q, WrongGradient.apply(k), v, g, beta, **options)

    return adapted("fla", library, check_call, even)


def as_compiled_well():
    def library(q, k, v, g, beta, cu_seqlens_cpu=None, **options):
        return standard(q, k, v, g, beta, **options)

    return adapted("fla", library, check_call, even)
