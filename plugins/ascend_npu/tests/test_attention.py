"""What attention's contract can't ask: packed sequences, masked rows, and what the operator does not compute."""

from __future__ import annotations

import pytest
import torch

from veomni_npu.attention import _triangle, standard
from veomni_ops.attention import AttentionModule
from veomni_ops.attention import standard as reference

LENGTHS = (5, 1, 9)
STARTS = torch.tensor([0, 5, 6, 15], dtype=torch.int32)


def heads(device, *counts, batch=1):
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randn(batch, sum(LENGTHS), count, 16, generator=generator) for count in counts)
    return [tensor.to(device).transpose(1, 2).requires_grad_() for tensor in drawn]


def one_by_one(module, tensors):
    """The reference for each of the packed sequences."""
    sequences = zip(*(tensor.split(LENGTHS, dim=2) for tensor in tensors), strict=True)
    return torch.cat([reference(module, *sequence, None)[0] for sequence in sequences], dim=1)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("where", ["npu", "cpu"])
def test_packed_sequences_are_each_attended_alone(npu, causal, where):
    tensors, copies = heads(npu, 4, 2, 2), heads("cpu", 4, 2, 2)
    module = AttentionModule(2, is_causal=causal)
    starts = STARTS.to(where)
    found, _ = standard(module, *tensors, None, cu_seq_lens_q=starts, cu_seq_lens_k=starts, sliding_window=None)
    wanted = one_by_one(module, copies)
    torch.testing.assert_close(found.cpu(), wanted)
    found.sin().sum().backward()
    wanted.sin().sum().backward()
    for mine, theirs in zip(tensors, copies, strict=True):
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad)


def test_packed_queries_are_the_last_positions_of_their_keys(npu):
    query, key, value = heads("cpu", 4, 2, 2)
    queries, keys = (3, 1, 4), LENGTHS
    query = query[:, :, : sum(queries)]
    module = AttentionModule(2)
    starts = (torch.tensor([0, *counts]).cumsum(0) for counts in (queries, keys))
    found, _ = standard(
        module,
        *(t.detach().to(npu) for t in (query, key, value)),
        None,
        cu_seq_lens_q=next(starts),
        cu_seq_lens_k=next(starts),
    )
    sequences = zip(query.split(queries, 2), key.split(keys, 2), value.split(keys, 2), strict=True)
    wanted = [reference(module, q, k, v, None)[0] for q, k, v in sequences]
    torch.testing.assert_close(found.cpu(), torch.cat(wanted, dim=1))


def test_the_callers_is_causal_comes_before_the_modules(npu):
    tensors, copies = heads(npu, 2, 2, 2), heads("cpu", 2, 2, 2)
    found, _ = standard(AttentionModule(1), *tensors, None, is_causal=False)
    torch.testing.assert_close(found.cpu(), reference(AttentionModule(1, is_causal=False), *copies, None)[0])


def test_what_an_evaluation_kept_serves_the_training_that_follows(npu):
    _triangle.cache_clear()
    module, tensors = AttentionModule(1), heads(npu, 2, 2, 2)
    with torch.inference_mode():
        standard(module, *tensors, None)
    found, _ = standard(module, *tensors, None)
    found.sum().backward()
    assert all(tensor.grad is not None for tensor in tensors)


def test_a_row_of_which_nothing_is_kept_harms_no_other(npu):
    kept = torch.ones(1, 1, 15, 15, dtype=torch.bool).tril()
    kept[..., :3] = False
    found, _ = standard(AttentionModule(1), *heads(npu, 2, 2, 2), kept.to(npu))
    wanted, _ = reference(AttentionModule(1), *heads("cpu", 2, 2, 2), kept)
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found.cpu()[:, 3:], wanted[:, 3:])


@pytest.mark.parametrize(
    "options, batch, message",
    [
        ({"softcap": 50.0}, 1, "does not compute softcap"),
        ({"s_aux": torch.zeros(2)}, 1, "does not compute s_aux"),
        ({"cu_seq_lens_q": STARTS, "cu_seq_lens_k": STARTS, "sliding_window": 4}, 1, "without a sliding window"),
        ({"cu_seq_lens_q": STARTS, "cu_seq_lens_k": STARTS}, 2, "a batch of one"),
        ({"cu_seq_lens_k": STARTS}, 1, "needs cu_seq_lens_q and cu_seq_lens_k together"),
        ({"position_bias": torch.zeros(1)}, 1, "does not compute `position_bias`; choose eager"),
        ({"indices": torch.zeros(1)}, 1, "does not compute `indices`"),
        ({"block_indices": torch.zeros(1)}, 1, "does not compute `block_indices`"),
        ({"sinks": torch.zeros(1)}, 1, "does not compute `sinks`"),
    ],
)
def test_what_is_not_computed_is_refused(npu, options, batch, message):
    with pytest.raises(ValueError, match=message):
        standard(AttentionModule(1), *heads(npu, 2, 2, 2, batch=batch), None, **options)
