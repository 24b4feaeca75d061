"""The calls whose cost ``host_cost.py`` measures: of each of our Triton kernels, as models make them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.shared.in_processes import leaf


@dataclass(frozen=True)
class Case:
    """A call of a kernel.

    Attributes:
        name: of the row.
        call: forward.
        inputs: those that get gradients.
    """

    name: str
    call: Callable[[], Any]
    inputs: Sequence[Tensor]


def bfloat16(*shape: int) -> Tensor:
    return leaf(*shape, dtype=torch.bfloat16)


def norm() -> Case:
    from veomni_triton import rms_norm

    x, weight = bfloat16(2, 16, 1024), bfloat16(1024)
    return Case("rms_norm", lambda: rms_norm.standard(x, weight, 1e-6), [x, weight])


class Norm(nn.Module):
    """A norm whose code is a call of the kernel."""

    def __init__(self, eps: float) -> None:
        from veomni_triton import rms_norm

        super().__init__()
        self.weight, self.eps, self._kernel = nn.Parameter(torch.ones(1024).bfloat16()), eps, rms_norm.standard

    def forward(self, x: Tensor) -> Tensor:
        return self._kernel(x, self.weight, self.eps)


def module_norm() -> Case:
    """What a bound module is compared with."""
    x, module = bfloat16(2, 16, 1024), Norm(1e-6)
    return Case("rms_norm in a module", lambda: module(x), [x, module.weight])


def bound_norm() -> Case:
    """The same in a module of a model that was bound, in which a norm's own code was."""
    from veomni_core.sites.site import Site
    from veomni_transformers.norms.rms_norm import NormModules
    from veomni_triton import rms_norm

    model = nn.Sequential(nn.RMSNorm(1024, eps=1e-6, dtype=torch.bfloat16))
    site = Site("rms_norm", "0", "norm modules", "standard", "", detail={"eps": 1e-6})
    for change in NormModules().install(model, site, rms_norm.standard, None):
        change.apply()
    x, module = bfloat16(2, 16, 1024), model[0]
    return Case("rms_norm in a bound module", lambda: module(x), [x, module.weight])


def gated_norm() -> Case:
    from veomni_triton import rms_norm_gated

    x, gate, weight = bfloat16(256, 128), bfloat16(256, 128), bfloat16(128)
    return Case("rms_norm_gated", lambda: rms_norm_gated.standard(x, gate, weight, 1e-6), [x, gate, weight])


def rotary() -> Case:
    from veomni_triton import rotary_pos_emb

    # As models make them: [B, S, H, D], transposed.
    q, k = (bfloat16(2, 8, heads, 128) for heads in (16, 8))
    cos, sin = torch.randn(2, 1, 8, 128).bfloat16().unbind()
    return Case("rotary_pos_emb", lambda: rotary_pos_emb.full(q.transpose(1, 2), k.transpose(1, 2), cos, sin), [q, k])


def swiglu() -> Case:
    from veomni_triton import swiglu_mlp

    gate, up = bfloat16(2, 16, 1024), bfloat16(2, 16, 1024)
    return Case("swiglu_mlp", lambda: swiglu_mlp.standard(gate, up), [gate, up])


def load_balancing() -> Case:
    from veomni_triton_moe import load_balancing_loss

    logits = tuple(bfloat16(8, 128) for _ in range(48))
    return Case("load_balancing_loss, 48 layers", lambda: load_balancing_loss.standard(logits, 128, 8), logits)


def experts(rank: int = 0) -> Case:
    from veomni_triton_moe import moe_experts

    tokens, hidden, intermediate, count, k = 64, 128, 64, 16, 4
    states, weights = bfloat16(tokens, hidden), bfloat16(tokens, k)
    index = torch.randn(tokens, count).topk(k).indices
    gate_up, down = bfloat16(count, 2 * intermediate, hidden), bfloat16(count, hidden, intermediate)
    inputs, adapters = [states, weights, gate_up, down], []
    if rank:
        factors = [
            (bfloat16(count, rank, width), bfloat16(count, height, rank))
            for height, width in (gate_up.shape[1:], down.shape[1:])
        ]
        adapters = [(a, b, 2.0) for a, b in factors]
        for frozen in (gate_up, down):
            frozen.requires_grad_(False)
        inputs = [states, weights, *(factor for pair in factors for factor in pair)]
    name = f"moe_experts, frozen, adapters of rank {rank}" if rank else "moe_experts"
    return Case(name, lambda: moe_experts.standard(states, index, weights, gate_up, down, *adapters), inputs)


def convolution() -> Case:
    from veomni_triton import causal_conv1d

    # As models make them: [B, S, C], transposed.
    x, weight = bfloat16(1, 128, 256), bfloat16(256, 4)
    return Case(
        "causal_conv1d", lambda: causal_conv1d.standard(x.transpose(1, 2), weight, activation="silu"), [x, weight]
    )


def delta_rule() -> Case:
    from veomni_triton import chunk_gated_delta_rule

    query, key, value = bfloat16(1, 128, 2, 128), bfloat16(1, 128, 2, 128), bfloat16(1, 128, 4, 128)
    g, beta = leaf(1, 128, 4), bfloat16(1, 128, 4)
    inputs = [query, key, value, g, beta]
    return Case(
        "chunk_gated_delta_rule",
        lambda: chunk_gated_delta_rule.standard(*inputs, use_qk_l2norm_in_kernel=True)[0],
        inputs,
    )


def logprobs() -> Case:
    from veomni_triton import token_logprobs

    states, weight, labels = bfloat16(16, 16), bfloat16(512, 16), torch.arange(16)
    kernel = token_logprobs.causal(0)
    return Case("token_logprobs, one tile", lambda: kernel(states, weight, labels)[0], [states, weight])


CASES = {
    "rms_norm": norm,
    "module_rms_norm": module_norm,
    "bound_rms_norm": bound_norm,
    "rms_norm_gated": gated_norm,
    "rotary_pos_emb": rotary,
    "swiglu_mlp": swiglu,
    "load_balancing_loss": load_balancing,
    "moe_experts": experts,
    "moe_experts_adapters": partial(experts, 16),
    "causal_conv1d": convolution,
    "chunk_gated_delta_rule": delta_rule,
    "token_logprobs": logprobs,
}
