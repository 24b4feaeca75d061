"""Logits that are computed on first use are a tensor like any other to whoever reads or writes them."""

from __future__ import annotations

import copy
import io
import pickle

import numpy
import pytest
import torch
from deferred_head import VOCABULARY, Head, assert_like_eager, both

from veomni_core.errors import LogitsGoneError
from veomni_transformers.forwards.deferred_logits import DeferredLogits

ALL = slice(None)


@pytest.mark.parametrize(
    "index, waits",
    [
        (0, True),
        (..., True),
        ((ALL, slice(-1)), True),
        ((ALL, -1), True),
        ((..., ALL), True),
        ((ALL, slice(1, None), ALL), True),
        ((..., 3), False),
        ((..., slice(5)), False),
        ((0, 1, 2), False),
        ((0, 1, 2, ...), False),
        ((ALL, ALL, [1, 4]), False),
        (torch.tensor([True, False]), False),
    ],
    ids=str,
)
def test_an_index_that_leaves_the_vocabulary_whole_computes_nothing(index, waits):
    deferred, eager = Head(True), Head(False)
    found = deferred.logits[index]
    assert (isinstance(found, DeferredLogits) and found.computed is None) == waits
    torch.testing.assert_close(found + 0, eager.logits[index])


READERS = {
    "==": lambda x: (x == 0).sum(),
    "isinstance": lambda x: isinstance(x, torch.Tensor) and torch.is_tensor(x),
    "1 - logits": lambda x: 1 - x,
    "logits ** 2": lambda x: x**2,
    "len": len,
    "argmax": lambda x: x.argmax(-1),
    "numpy": lambda x: numpy.asarray(x.detach()).sum().item(),
    "tolist": lambda x: x.tolist(),
    "data": lambda x: x.data + 0,
    "iteration": lambda x: [row.sum().item() for row in x],
    "torch.cat": lambda x: torch.cat([x, x]),
    "bits": lambda x: x.detach().view(torch.int32),
    "copy.copy": lambda x: copy.copy(x) + 0,
    "pickle": lambda x: pickle.loads(pickle.dumps(x.detach())),
    "torch.save": lambda x: _saved(x.detach()),
    "repr": lambda x: repr(x.detach()),
    "form": lambda x: (x.shape, x.stride(), x.dtype, x.device, x.requires_grad, x.is_leaf, x.is_contiguous()),
    "storage": lambda x: x.untyped_storage().nbytes(),
    "empty_like": lambda x: type(torch.empty_like(x)) is torch.Tensor,
    "pytree": lambda x: torch.utils._pytree.tree_map_only(torch.Tensor, torch.mean, {"logits": x}),
    "in place": lambda x: torch.softmax(x.detach().masked_fill_(torch.arange(VOCABULARY) < 5, -1e9), -1),
}


def _saved(tensor: torch.Tensor) -> torch.Tensor:
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_after_the_forward_they_read_as_any_tensor(read):
    def run(head: Head):
        head.loss()
        head.leave_forward()
        return read(head.logits)

    (found, _), (wanted, _) = both(run)
    if isinstance(wanted, torch.Tensor | dict | list):
        torch.testing.assert_close(found, wanted)
    else:
        assert found == wanted


def test_a_boolean_of_them_is_as_ambiguous_as_any_tensor_s():
    with pytest.raises(RuntimeError, match="Boolean value of Tensor with more than one value is ambiguous"):
        bool(Head(True).logits)


def test_what_is_written_into_them_stays():
    def run(head: Head) -> torch.Tensor:
        head.leave_forward()
        head.logits[:, :, 0] = -1e9
        head.logits.div_(2.0)
        return head.logits.detach() + 0

    assert_like_eager(run)


def test_a_write_does_not_reach_the_copies_taken_before_it_and_reaches_the_views():
    def run(head: Head) -> list[torch.Tensor]:
        view, duplicate = head.logits[:, :-1], head.logits.clone()
        head.logits.mul_(3.0)
        return [(tensor + 0).detach() for tensor in (view, duplicate, head.logits)]

    assert_like_eager(run)


@pytest.mark.parametrize(
    "change",
    [
        lambda weight: weight.detach().mul_(0.9),
        lambda weight: weight.data.copy_(weight.data * 0.9),
        lambda weight: weight.untyped_storage().resize_(0),
    ],
    ids=["in place", "through .data", "freed, as FSDP2 does"],
)
def test_reading_them_after_the_weight_changed_is_refused(change):
    head = Head(True)
    head.leave_forward()
    change(head.leaves[1])
    with pytest.raises(LogitsGoneError, match=r"weight was .* since.* Read outputs.logits before that"):
        head.logits.argmax(-1)


def test_reading_them_before_keeps_them():
    head, eager = Head(True), Head(False)
    head.leave_forward()
    head.logits.argmax(-1)
    head.leaves[1].detach().zero_()
    torch.testing.assert_close(head.logits + 0, eager.logits)


def test_a_cast_to_float32_after_the_forward_computes_nothing_and_reads_as_any_tensor():
    """accelerate casts a model's outputs so in mixed precision, in every step."""

    def run(head: Head) -> torch.Tensor:
        loss = head.loss()
        head.leave_forward()
        cast = head.logits.float()
        assert not isinstance(head.logits, DeferredLogits) or not head.logits.has_been_read
        (loss + (cast**2).sum()).backward()
        return cast.detach() + 0

    assert_like_eager(run, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "cast", [torch.Tensor.double, torch.Tensor.half, lambda x: x.to("meta")], ids=["double", "half", "device"]
)
def test_another_cast_after_the_forward_computes_them(cast):
    head = Head(True, dtype=torch.bfloat16)
    head.leave_forward()
    cast(head.logits)
    assert head.logits.has_been_read


def test_what_was_cast_reads_as_gone_after_the_weight_changed():
    head = Head(True, dtype=torch.bfloat16)
    head.leave_forward()
    cast = head.logits.float()
    head.leaves[1].detach().mul_(0.9)
    with pytest.raises(LogitsGoneError, match="a cast to float32 alone reads nothing"):
        cast.argmax(-1)
