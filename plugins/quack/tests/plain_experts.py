"""The grouped products in plain PyTorch, one expert at a time: what the composition of the experts is tested with."""

from __future__ import annotations

import itertools

import torch
from cute_checks import check_matrix
from torch import Tensor
from torch.nn import functional as F

from veomni_core.kernels import first_derivatives_only
from veomni_quack.moe_experts import layer
from veomni_quack.moe_experts.alignment import padded, readable


def _groups(offsets: Tensor):
    starts = offsets.tolist()
    return enumerate(slice(start, end) for start, end in itertools.pairwise(starts))


def _interleaved(halves: Tensor) -> Tensor:
    return torch.stack(halves.chunk(2, dim=-1), dim=-1).flatten(-2)


def _halves(interleaved: Tensor) -> Tensor:
    return torch.cat((interleaved[..., ::2], interleaved[..., 1::2]), dim=-1)


def _unwritten(*shape: int, like: Tensor) -> Tensor:
    """As memory that no kernel wrote: whatever reads it turns into NaN."""
    return torch.full(shape, torch.nan, dtype=like.dtype)


def _check_alignment(*operands: Tensor) -> None:
    for number, operand in enumerate(operands):
        check_matrix(f"operand {number}", operand)


def gated(hidden, gate_up_proj, offsets, token_of_row):
    _check_alignment(hidden, gate_up_proj)
    rows, width = len(token_of_row), gate_up_proj.shape[1]
    pre, activated = _unwritten(rows, width, like=hidden), _unwritten(rows, width // 2, like=hidden)
    for expert, group in _groups(offsets):
        both = hidden[token_of_row[group].long()] @ gate_up_proj[expert].T
        gate, up = both.chunk(2, dim=-1)
        pre[group], activated[group] = _interleaved(both), F.silu(gate) * up
    return pre, activated


def gated_backward(dresult, down_proj, pre, weights, offsets, token_of_row):
    _check_alignment(dresult, down_proj, pre)
    rows, width = pre.shape
    dpre, activated = _unwritten(rows, width, like=pre), _unwritten(rows, width // 2, like=pre)
    dweights = _unwritten(rows, like=pre)
    for expert, group in _groups(offsets):
        gate, up = pre[group][:, ::2], pre[group][:, 1::2]
        sigmoid, scale = gate.sigmoid(), weights[group, None].to(pre.dtype)
        unscaled = dresult[token_of_row[group].long()] @ down_proj[expert]
        dactivated = unscaled * scale
        silu = gate * sigmoid
        dgate = dactivated * up * (sigmoid + silu * (1 - sigmoid))
        dpre[group] = torch.stack((dgate, dactivated * silu), dim=-1).flatten(-2)
        activated[group] = silu * up * scale
        dweights[group] = (unscaled * silu * up).sum(-1)
    return dpre, activated, dweights


def rows(rows, matrices, offsets, out, interleaved):
    _check_alignment(rows, matrices, out)
    out.fill_(torch.nan)
    for expert, group in _groups(offsets):
        out[group] = (_halves(rows[group]) if interleaved else rows[group]) @ matrices[expert]


def gradient(by_token, rows, offsets, token_of_row, out, interleaved):
    _check_alignment(by_token, rows, out)
    for expert, group in _groups(offsets):
        of_rows = _halves(rows[group]) if interleaved else rows[group]
        out[expert] = by_token[token_of_row[group].long()].T @ of_rows


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, index, weights, gate_up_proj, down_proj):
        operands = (readable(hidden), index, weights, readable(gate_up_proj), readable(down_proj))
        result, pre, routing = layer.forward(*operands, products=PRODUCTS)
        ctx.routing = routing
        ctx.save_for_backward(hidden, weights, gate_up_proj, down_proj, pre)
        return result

    @staticmethod
    @first_derivatives_only
    def backward(ctx, dresult):
        hidden, weights, gate_up_proj, down_proj, pre = ctx.saved_tensors
        operands = (readable(dresult), readable(hidden), weights, readable(gate_up_proj), readable(down_proj))
        found = layer.backward(*operands, pre, ctx.routing, True, products=PRODUCTS)
        return found[0], None, *found[1:]


class PRODUCTS:
    gated, gated_backward = staticmethod(gated), staticmethod(gated_backward)
    rows, gradient = staticmethod(rows), staticmethod(gradient)


def standard(hidden, top_k_index, top_k_weights, gate_up_proj, down_proj):
    """The experts on these products: the composition that the GPU runs, without QuACK."""
    tokens, gate_up, down = padded(hidden, gate_up_proj, down_proj)
    result = _Experts.apply(tokens, top_k_index, top_k_weights, gate_up, down)
    return result if tokens is hidden else result[:, : hidden.shape[1]]
