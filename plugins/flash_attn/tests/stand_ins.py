"""Modules in the place of the FlashAttention packages, with their signatures, computing on the CPU.

They let the adapters be tested without a GPU: layouts, bounds, windows, sinks and gradients. What the libraries
themselves compute is tested on a GPU.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, library
from torch.nn import functional as F

from veomni_conformance.comparison import same
from veomni_ops.attention import visible
from veomni_ops.attention_blocks import TORCH, Block


@dataclass
class _Attention:
    """``[B, S, H, D]`` or, with bounds, ``[T, H, D]``, in float32, with the heads before the positions."""

    q: Tensor
    k: Tensor
    v: Tensor
    bounds: Any
    scale: float
    causal: bool
    window: int
    softcap: float

    @torch.autocast("cpu", enabled=False)  # the libraries' kernels know nothing of it
    def __post_init__(self) -> None:
        assert self.q.shape[-1] % 8 == 0 and self.q.dtype in (torch.bfloat16, torch.float16)
        groups = self.q.shape[-2] // self.k.shape[-2]
        heads = [each.movedim(-2, -3).float() for each in (self.q, self.k, self.v)]
        self.query, self.key, self.value = (heads[0], *(each.repeat_interleave(groups, -3) for each in heads[1:]))
        scores = self.query @ self.key.transpose(-1, -2) * self.scale
        self.slope = torch.ones_like(scores)
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
            self.slope = 1 - (scores / self.softcap) ** 2
        assert self.bounds is None or all(each.dtype == torch.int32 and each.is_contiguous() for each in self.bounds)
        window = self.window + 1 if self.window >= 0 else None
        self.kept = visible(scores, self.causal, window, *(self.bounds or (None, None)))
        scores = scores.masked_fill(~self.kept, float("-inf"))
        self.lse = scores.logsumexp(-1)
        # Zeros of a query that sees no key, as the libraries write them.
        self.weights = torch.where(self.kept.any(-1, keepdim=True), scores.softmax(-1), 0.0)

    @torch.autocast("cpu", enabled=False)
    def output(self) -> Tensor:
        result = self.weights @ self.value
        if not bool(self.value.isfinite().all()):  # the libraries don't read the values of other sequences
            terms = self.weights.unsqueeze(-1) * self.value.unsqueeze(-3)
            result = torch.where(self.kept.unsqueeze(-1), terms, 0.0).sum(-2)
        return result.movedim(-3, -2).to(self.q.dtype).contiguous()

    @torch.autocast("cpu", enabled=False)
    def backward(self, dout: Tensor, dlse: Tensor | None) -> tuple[Tensor, ...]:
        upstream = dout.movedim(-2, -3).float()
        dvalue = self.weights.transpose(-1, -2) @ upstream
        dweights = upstream @ self.value.transpose(-1, -2)
        delta = (dweights * self.weights).sum(-1, keepdim=True) - (0 if dlse is None else dlse.unsqueeze(-1))
        dscores = self.weights * (dweights - delta) * self.slope * self.scale
        dkey = dscores.transpose(-1, -2) @ self.query
        dquery = dscores @ self.key
        shared = (each.unflatten(-3, (self.k.shape[-2], -1)).sum(-3) for each in (dkey, dvalue))
        return tuple(each.movedim(-3, -2).to(self.q.dtype).contiguous() for each in (dquery, *shared))


def _check(*heads: Tensor, expanded: bool = False) -> None:
    """What the libraries' loads ask of memory, and find out only on a GPU."""
    for each in heads:
        if type(each) is not Tensor:
            continue
        if each.data_ptr() % 16:
            raise RuntimeError("misaligned address")
        outer = each.stride()[:-1]
        if each.stride(-1) != 1 or any(stride % 8 or not (stride or expanded) for stride in outer):
            raise RuntimeError(f"misaligned strides: {each.stride()}")


class _Two(torch.autograd.Function):
    """Gives its gradients no graph, as the library does."""

    @staticmethod
    def forward(ctx, q, k, v, bounds, *settings):
        assert q.shape[-1] == v.shape[-1]
        _check(q, k, v, expanded=True)
        ctx.save_for_backward(q, k, v, *(bounds or ()))
        ctx.settings = settings
        return _Attention(q, k, v, bounds, *settings).output()

    @staticmethod
    def backward(ctx, dout):
        q, k, v, *bounds = (each.detach() for each in ctx.saved_tensors)
        _check(dout)
        gradients = _Attention(q, k, v, tuple(bounds) or None, *ctx.settings).backward(dout.detach(), None)
        return *gradients, None, *(None,) * len(ctx.settings)


def _two(q: Any, k: Any, v: Any, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0):
    assert window_size[0] == window_size[1]
    if dropout_p:
        assert window_size[0] == -1 and not softcap
        return _dropping(q, k, v, dropout_p, softmax_scale, causal)
    return _Two.apply(q, k, v, None, softmax_scale, causal, window_size[0], softcap)


def _dropping(q: Tensor, k: Tensor, v: Tensor, rate: float, scale: float, causal: bool) -> Tensor:
    groups = q.shape[2] // k.shape[2]
    key, value = (each.repeat_interleave(groups, dim=2).transpose(1, 2).float() for each in (k, v))
    scores = q.transpose(1, 2).float() @ key.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1) if causal else torch.tensor(False)
    weights = F.dropout(scores.masked_fill(hidden, float("-inf")).softmax(-1), rate)
    return (weights @ value).to(q.dtype).transpose(1, 2)


def _two_packed(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0,
):  # fmt: skip
    assert window_size[0] == window_size[1] and not dropout_p
    bounds = _checked_bounds(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _Two.apply(q, k, v, bounds, softmax_scale, causal, window_size[0], softcap)


def _one_sided(scale, softcap, causal, left, right):
    assert right == (0 if causal else -1)
    return Block(scale, softcap, causal, None if left < 0 else left)


def _two_forward(
    q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
    return_softmax,
):  # fmt: skip
    _check(q, k, v, expanded=True)
    assert dropout_p == 0.0 and alibi_slopes is None and not return_softmax
    block = _one_sided(softmax_scale, softcap, causal, window_size_left, window_size_right)
    return *TORCH.attend(q, k, v, block), None, None


def _two_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
    window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
):  # fmt: skip
    _check(dout, q, k, v, out, expanded=True)
    assert softmax_lse.is_contiguous() and dropout_p == 0.0 and alibi_slopes is None and not deterministic
    block = _one_sided(softmax_scale, softcap, causal, window_size_left, window_size_right)
    for given, found in zip((dq, dk, dv), TORCH.gradients(dout, q, k, v, out, softmax_lse, block), strict=True):
        given.copy_(found)


def _checked_bounds(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
    assert isinstance(max_seqlen_q, int) and max_seqlen_q >= int(cu_seqlens_q.diff().max())
    assert isinstance(max_seqlen_k, int) and max_seqlen_k >= int(cu_seqlens_k.diff().max())
    return cu_seqlens_q, cu_seqlens_k


# Of FlashAttention 3's schemas (3.0.0b1), what training takes; each operator writes into what it returns.
_OPTIONS = (
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, "
    "float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, int window_size_right=-1, "
    "float softcap=0.0"
)
_THREE_FORWARD = (
    f"fwd(Tensor q, Tensor k, Tensor v, Tensor(out!)? out=None, {_OPTIONS}, int num_splits=0) "
    "-> (Tensor(out!), Tensor, Tensor, Tensor)"
)
_THREE_BACKWARD = (
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(dq!)? dq=None, "
    f"Tensor(dk!)? dk=None, Tensor(dv!)? dv=None, {_OPTIONS}) -> (Tensor(dq!), Tensor(dk!), Tensor(dv!), Tensor)"
)


def _three(
    q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, scale=None, causal=False,
    left=-1, right=-1, softcap=0.0,
):  # fmt: skip
    assert left == right and all(each.shape[-1] == q.shape[-1] for each in (q, k, v))
    _check(q, k, v)
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    bounds = None if cu_seqlens_q is None else _checked_bounds(*lengths)
    return _Attention(q, k, v, bounds, scale, causal, left, softcap)


def _three_block(
    cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, scale=None, causal=False, left=-1,
    right=-1, softcap=0.0,
):  # fmt: skip
    """The options of a call whose window is not two-sided, as those of a ring's blocks; else ``None``."""
    if cu_seqlens_q is not None or (left == right and (causal or left >= 0)):
        return None
    return _one_sided(scale, softcap, causal, left, right)


def _three_forward(q, k, v, out, *options):
    *options, num_splits = options
    assert out is None and num_splits == 1
    if (block := _three_block(*options)) is not None:
        return *TORCH.attend(q, k, v, block), q.new_empty(0), q.new_empty(0)
    attention = _three(q, k, v, *options)
    return attention.output(), attention.lse, q.new_empty(0), q.new_empty(0)


def _three_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, *options):
    _check(dout, out)
    if (block := _three_block(*options)) is not None:
        gradients = TORCH.gradients(dout, q, k, v, out, softmax_lse, block)
    else:
        attention = _three(q, k, v, *options)
        assert same(attention.output(), out) and same(attention.lse, softmax_lse)
        gradients = attention.backward(dout, None)
    for given, found in zip((dq, dk, dv), gradients, strict=True):
        given.copy_(found)
    return dq, dk, dv, q.new_empty(0)


@functools.cache
def _three_registered() -> library.Library:
    """As importing the package registers them."""
    operators = library.Library("flash_attn_3", "DEF")
    for schema, function in ((_THREE_FORWARD, _three_forward), (_THREE_BACKWARD, _three_backward)):
        operators.impl(operators.define(schema), function, "CPU")
    return operators


def _four_forward(
    q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, softmax_scale=None,
    causal=False, softcap=None, window_size_left=None, window_size_right=None, return_lse=False,
):  # fmt: skip
    assert return_lse and window_size_left == window_size_right and softcap != 0.0
    _check(q, k, v)
    bounds = None if cu_seqlens_q is None else (cu_seqlens_q, cu_seqlens_k)
    window = -1 if window_size_left is None else window_size_left
    attention = _Attention(q, k, v, bounds, softmax_scale, causal, window, softcap or 0.0)
    return attention.output(), attention.lse


def _four_backward(
    q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
    window_size_right=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, dlse=None,
):  # fmt: skip
    assert softcap is not None and not (softcap and cu_seqlens_q is not None)
    assert q.shape[-2] == k.shape[-2] or q.shape[-1] == v.shape[-1]
    _check(q, k, v, out, dout)
    assert dlse is None or dlse.stride(-1) == 1
    bounds = None if cu_seqlens_q is None else (cu_seqlens_q, cu_seqlens_k)
    window = -1 if window_size_left is None else window_size_left
    attention = _Attention(q, k, v, bounds, softmax_scale, causal, window, softcap)
    assert same(attention.output(), out) and same(attention.lse, lse)
    # In the layouts of what they are gradients of, as the library gives them.
    found = zip((q, k, v), attention.backward(dout, dlse), strict=True)
    return tuple(torch.empty_like(head).copy_(gradient) for head, gradient in found)


_MODULES = {
    "flash_attn": {"flash_attn_func": _two, "flash_attn_varlen_func": _two_packed},
    "flash_attn.flash_attn_interface": {"_flash_attn_forward": _two_forward, "_flash_attn_backward": _two_backward},
    "flash_attn.cute": {},
    "flash_attn.cute.interface": {"_flash_attn_fwd": _four_forward, "_flash_attn_bwd": _four_backward},
    "flash_attn_interface": {},
}


@contextmanager
def installed() -> Iterator[None]:
    """The stand-ins can be imported."""
    _three_registered()
    before = {name: sys.modules.get(name) for name in _MODULES}
    for name, attributes in _MODULES.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.__path__ = []
        vars(module).update(attributes)
        sys.modules[name] = module
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
