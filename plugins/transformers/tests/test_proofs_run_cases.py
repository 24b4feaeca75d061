"""What a proof runs: both modes, every dtype, the real width, many shapes and values. What differs in one is found."""

from __future__ import annotations

import pytest
import torch
from lookalikes import gated, normed, routed, sites, variants, varied
from torch import nn
from torch.nn import functional as F

NORMS = {
    "dropout": lambda self, x: F.dropout(normed(self, x), 0.01, self.training),
    "another result in eval": lambda self, x: normed(self, x) * (1 if self.training else 2),
    "one more in float32": lambda self, x: normed(self, x) + (1.0 if x.dtype == torch.float32 else 0.0),
    "a clamp in float16": lambda self, x: normed(self, x.clamp(-1, 1) if x.dtype == torch.float16 else x),
    "inputs clamped at 100": lambda self, x: normed(self, x.clamp(-100, 100)),
    "inputs clamped at 1e5": lambda self, x: normed(self, x.clamp(-1e5, 1e5)),
    "results clamped at 6": lambda self, x: normed(self, x).clamp(-6, 6),
    "rows of zeros": lambda self, x: torch.where((x == 0).all(-1, keepdim=True), self.weight, normed(self, x)),
    "a batch of one": lambda self, x: normed(self, x) * (2 if x.shape[0] == 1 else 1),
    "one position": lambda self, x: normed(self, x) * (2 if x.shape[1] == 1 else 1),
    "four dimensions": lambda self, x: normed(self, x) * (2 if x.dim() == 4 else 1),
    "two dimensions": lambda self, x: normed(self, x) * (2 if x.dim() == 2 else 1),
    "the first rows alone": lambda self, x: torch.cat((normed(self, x[:50]), x[50:])),
}


@pytest.mark.parametrize("name", NORMS)
def test_norms(name):
    assert variants("rms_norm", varied("rms_norm", NORMS[name]).eval()) == [None]
    assert variants("rms_norm", varied("rms_norm", NORMS[name]).train()) == [None]


def _in_groups(self, x):
    y = x.float().unflatten(-1, (-1, 16))
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
    return self.weight * y.flatten(-2).to(x.dtype)


def _of_the_first(self, x):
    y = x.float()
    return self.weight * (y * torch.rsqrt(y[..., :16].pow(2).mean(-1, keepdim=True) + self.variance_epsilon)).to(
        x.dtype
    )


@pytest.mark.parametrize("forward", [_in_groups, _of_the_first])
def test_norms_are_run_at_their_real_width(forward):
    assert variants("rms_norm", varied("rms_norm", forward)) == [None]


class WeightPerHeadRMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(4, 16)), 1e-6

    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def test_a_norm_over_several_dimensions_is_outside_the_contract():
    several = nn.RMSNorm((4, 16), eps=1e-6), nn.RMSNorm((4, 16), eps=1e-6, elementwise_affine=False)
    found = sites("rms_norm", *several, WeightPerHeadRMSNorm())
    assert [site.variant for site in found] == [None] * 3
    assert all("dimensions, expected" in site.evidence for site in found)
    assert variants("rms_norm", nn.RMSNorm(16, eps=1e-6)) == ["cast_after"]


MLPS = {
    "dropout": lambda self, x: F.dropout(gated(self, x), 0.01, self.training),
    "another result in eval": lambda self, x: gated(self, x) * (1 if self.training else 2),
    "twice in bfloat16": lambda self, x: gated(self, x) * (2 if x.dtype == torch.bfloat16 else 1),
    "a clamp in float16": lambda self, x: (
        gated(self, x).clamp(-0.1, 0.1) if x.dtype == torch.float16 else gated(self, x)
    ),
    "a clamp at 1e4": lambda self, x: self.down_proj(self.act_fn(self.gate_proj(x).clamp(-1e4, 1e4)) * self.up_proj(x)),
    "more than 3 positions": lambda self, x: gated(self, x) * (2 if x.shape[1] > 3 else 1),
    "a batch of one": lambda self, x: gated(self, x) * (2 if x.shape[0] == 1 else 1),
    "a dropout of its own": lambda self, x: self.dropout(gated(self, x)),
}


@pytest.mark.parametrize("name", MLPS)
def test_gated_mlps(name):
    module = varied("swiglu_mlp", MLPS[name], dropout=nn.Dropout(0.01))
    assert variants("swiglu_mlp", module.eval()) == [None]
    assert variants("swiglu_mlp", module.train()) == [None]


def test_a_dropout_of_nothing_is_no_dropout():
    module = varied("swiglu_mlp", MLPS["a dropout of its own"], dropout=nn.Dropout(0.0))
    assert variants("swiglu_mlp", module) == ["standard"]


def _with_capacity(self, x, index, weights):
    result = torch.zeros_like(x)
    for expert in range(4):
        token, position = torch.where(index == expert)
        token, position = token[:40], position[:40]
        gate, up = F.linear(x[token], self.gate_up_proj[expert]).chunk(2, -1)
        output = F.linear(F.silu(gate) * up, self.down_proj[expert]) * weights[token, position, None]
        result = result.index_add(0, token, output)
    return result


EXPERTS = {
    "another result in eval": lambda self, x, i, w: routed(self, x, i, w) * (1 if self.training else 2),
    "twice in bfloat16": lambda self, x, i, w: routed(self, x, i, w) * (2 if x.dtype == torch.bfloat16 else 1),
    "a capacity of 40 tokens": _with_capacity,
    "more than 16 tokens": lambda self, x, i, w: routed(self, x, i, w) * (2 if len(x) > 16 else 1),
    "one expert a token": lambda self, x, i, w: routed(self, x, i, w) * (2 if i.shape[1] == 1 else 1),
    "weights clipped at one": lambda self, x, i, w: routed(self, x, i, w.clamp(max=1.0)),
    "negative weights dropped": lambda self, x, i, w: routed(self, x, i, w.clamp_min(0)),
    "dropout": lambda self, x, i, w: F.dropout(routed(self, x, i, w), 0.01, self.training),
}


@pytest.mark.parametrize("name", EXPERTS)
def test_experts(name):
    assert variants("moe_experts", varied("moe_experts", EXPERTS[name]).eval()) == [None]


def test_linears_of_several_dtypes_are_outside_the_contract():
    module = varied("swiglu_mlp", gated).to(torch.float16)
    module.down_proj.float()
    (site,) = sites("swiglu_mlp", module)
    assert site.variant is None
    assert "its linears have different dtypes" in site.evidence
