"""The Triton kernels that copy and sum rows: the same as PyTorch's, for any routing, in any dtype and layout."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from veomni_ops.expert_ranks import ExpertRanks
from veomni_triton_moe.token_dispatch import row_kernels, rows
from veomni_triton_moe.token_dispatch.exchange import Exchange

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def exchange_of(index: torch.Tensor, ranks: int, local: int, max_tokens: int) -> Exchange:
    """The rows that a rank would send, without other ranks; with a bound no count is exchanged."""
    return Exchange.of(index, ExpertRanks(None, ranks, 0, local), max_tokens)


@pytest.fixture(scope="module")
def both():
    """Runs a function by PyTorch, and by the kernels."""
    with pytest.MonkeyPatch.context() as patch:

        def run(function):
            found = []
            for kernels in (None, row_kernels):
                patch.setattr(rows, "_kernels", lambda _, kernels=kernels: kernels)
                found.append(function())
            return found

        yield run


@given(
    tokens=st.integers(0, 9),
    choices=st.integers(1, 5),
    ranks=st.integers(1, 5),
    local=st.integers(1, 3),
    width=st.sampled_from([1, 7, 24]),
    room=st.integers(0, 3),
    dtype=st.sampled_from(DTYPES),
    strided=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(deadline=None, max_examples=30)
def test_kernels_give_what_pytorch_gives(both, tokens, choices, ranks, local, width, room, dtype, strided, seed):
    draw = torch.Generator().manual_seed(seed)
    # Some indices are of no expert.
    index = torch.randint(-1, ranks * local + 1, (tokens, choices), generator=draw).to(DEVICE)
    exchange = exchange_of(index, ranks, local, max(1, tokens + room - 1))
    hidden = torch.randn(tokens, 2 * width, generator=draw).to(DEVICE, dtype)
    hidden = hidden[:, ::2] if strided else hidden[:, :width]
    weights = torch.randn(tokens, choices, generator=draw).to(DEVICE)

    def packed():
        buffer, layout = rows.packed(hidden, weights, exchange)
        return layout.hidden(buffer).clone(), layout.weights(buffer).clone(), layout.ids(buffer).clone()

    plain, kernels = both(packed)
    assert all(torch.equal(a, b) for a, b in zip(plain, kernels, strict=True))
    plain, kernels = both(lambda: rows.summed_rows(plain[0], exchange))
    assert torch.equal(plain, kernels)
