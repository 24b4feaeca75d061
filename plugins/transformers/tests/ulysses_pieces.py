"""The exchange, the slices and attention over them."""

from __future__ import annotations

import torch
from torch import Tensor
from ulysses_ranks import check, double, equal, raises, size

from veomni_ops.attention import AttentionModule, standard
from veomni_transformers.sequence import (
    gather_heads_scatter_seq,
    gather_outputs,
    gather_seq_scatter_heads,
    scatter_attention_heads,
    slice_input_tensor,
    sp_pad_and_slice,
    unpad_tensor,
)


@check
def exchange_gives_all_positions_of_my_heads_and_back() -> None:
    whole = double(2, 3 * size(), 2 * size(), 5)
    mine = slice_input_tensor(whole, 1)
    heads = gather_seq_scatter_heads(mine, seq_dim=1, head_dim=2)
    equal(heads, slice_input_tensor(whole, 2))
    equal(gather_heads_scatter_seq(heads, head_dim=2, seq_dim=1), mine)
    weight = torch.randn_like(whole)
    (gradient,) = torch.autograd.grad(heads, whole, slice_input_tensor(weight, 2))
    equal(slice_input_tensor(gradient, 1), slice_input_tensor(weight, 1))
    last = gather_seq_scatter_heads(slice_input_tensor(whole, -3), seq_dim=-3, head_dim=-2)
    equal(last, heads)
    raises(ValueError, "can't be split equally", lambda: gather_seq_scatter_heads(double(1, 2, size() + 1, 3), 1, 2))


@check
def attention_over_ranks_is_attention() -> None:
    n = size()
    for q_heads, k_heads, width, value_width, batch in (
        (4, 4, 8, 8, 2),
        (4, 2, 8, 8, 1),
        (8, 1, 4, 6, 2),
        (12, 4, 2, 2, 1),
    ):
        query, key = double(batch, q_heads, 3 * n, width), double(batch, k_heads, 3 * n, width)
        value = double(batch, k_heads, 3 * n, value_width)
        wanted, _ = standard(AttentionModule(q_heads // k_heads), query, key, value, None)
        upstream = torch.randn_like(wanted)
        gradients = torch.autograd.grad(wanted, (query, key, value), upstream)
        mine = [slice_input_tensor(t, 2).detach().requires_grad_() for t in (query, key, value)]
        q, k, v = scatter_attention_heads(*mine)
        assert q.shape[1] == q_heads // n and k.shape[1] == max(k_heads // n, 1)
        output, _ = standard(AttentionModule(q.shape[1] // k.shape[1]), q, k, v, None)
        found = gather_heads_scatter_seq(output, head_dim=2, seq_dim=1)
        equal(found, slice_input_tensor(wanted, 1))
        for name, mine_, wanted_ in zip(
            "qkv", torch.autograd.grad(found, mine, slice_input_tensor(upstream, 1)), gradients, strict=True
        ):
            equal(mine_, slice_input_tensor(wanted_, 2), f"the gradient of {name}")
    raises(ValueError, "does not divide", lambda: scatter_attention_heads(*[double(1, size() + 1, 2, 4)] * 3))
    raises(
        ValueError,
        "neither divides the other",
        lambda: scatter_attention_heads(double(1, 3 * size(), 2, 4), *[double(1, 3, 2, 4)] * 2),
    )


@check
def slices_pad_and_gather() -> None:
    whole = torch.arange(2.0 * 5 * 3).view(2, 5, 3)
    part = sp_pad_and_slice(whole, dim=1, pad_value=-1, pad_scale=3)
    length = -(-5 // (3 * size())) * 3 * size()
    assert part.shape == (2, length // size(), 3)
    joined = gather_outputs(part, gather_dim=1)
    assert torch.equal(unpad_tensor(joined, 1, length - 5), whole)
    assert bool((joined[:, 5:] == -1).all())
    assert torch.equal(gather_outputs(part, gather_dim=-2), joined)
    raises(ValueError, "pad it to a multiple", lambda: slice_input_tensor(double(size() + 1), 0))


@check
def the_exchange_traces_without_a_graph_break() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = scatter_attention_heads(q, k, v)
        output, _ = standard(AttentionModule(1), q, k, v, None)
        return gather_heads_scatter_seq(output, head_dim=2, seq_dim=1)

    inputs = [double(1, 4, 2, 8) for _ in range(3)]
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    found, wanted = compiled(*inputs), attend(*inputs)
    equal(found, wanted)
    for mine, theirs in zip(
        torch.autograd.grad(found.sum(), inputs), torch.autograd.grad(wanted.sum(), inputs), strict=True
    ):
        equal(mine, theirs)
