"""Documents as sequences: packed, alone in padded batches, or joined; and what a loss learns of each."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from veomni_trainer.data.batches import Batcher, learned_labels
from veomni_trainer.data.documents import Document
from veomni_trainer.data.packing import Pieces, pack
from veomni_trainer.data.sequences import arrange
from veomni_trainer.data.token_store import TokenStore, store_in_memory

END = 99


def _store(*lengths: int, masked: bool = False) -> TokenStore:
    """Documents of distinct tokens, of which every second one is learned if ``masked``."""
    documents, first = [], 100
    for length in lengths:
        mask = np.arange(length) % 2 == 0 if masked else None
        documents.append(Document(np.arange(first, first + length, dtype=np.uint16), mask))
        first += length
    return store_in_memory(documents)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=200), st.integers(1, 40), st.booleans(), st.integers(0, 5))
@settings(max_examples=60)
def test_every_token_is_packed_once_and_no_sequence_overflows(
    lengths: list[int], capacity: int, split: bool, seed: int
) -> None:
    ends = np.cumsum(lengths)
    pieces = Pieces.of(ends - lengths, ends, capacity, split=split)
    packs = pack(pieces.lengths, capacity, seed)
    assert sorted(packs.order.tolist()) == [*range(len(pieces.starts))]
    sums = [pieces.lengths[packs[number]].sum() for number in range(len(packs))]
    assert max(sums) <= capacity and sum(sums) == sum(lengths if split else np.minimum(lengths, capacity))
    if split:
        tokens = [t for start, n in zip(pieces.starts, pieces.lengths, strict=True) for t in range(start, start + n)]
        assert tokens == [*range(ends[-1])]
    assert len(sums) == 1 or sum(sorted(sums)[:2]) > capacity, "two sequences would fit into one"
    again = pack(pieces.lengths, capacity, seed)
    assert (again.order == packs.order).all() and (again.ends == packs.ends).all()


def test_a_seed_packs_other_documents_together() -> None:
    lengths = np.full(50, 3, np.int64)
    assert (pack(lengths, 6, seed=0).order != pack(lengths, 6, seed=1).order).any()


def test_a_packed_sequence_starts_again_at_each_document() -> None:
    sequences, counts = arrange(_store(5, 2, 3), 8, packing=True, padding=END, seed=0)
    first, second = sequences
    assert first["input_ids"].tolist() == [100, 101, 102, 103, 104, 107, 108, 109]
    assert first["position_ids"].tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert first["labels"].tolist() == [-100, 101, 102, 103, 104, -100, 108, 109]
    assert second["input_ids"].tolist() == [105, 106] + [END] * 6
    assert second["position_ids"].tolist() == [0, 1, 0, 1, 2, 3, 4, 5]
    assert second["labels"].tolist() == [-100, 106] + [-100] * 6
    assert counts.describe_sequences() == "10 tokens, 2 sequences, 62.5% full"


def test_long_text_is_split_and_long_chats_are_cut_off_and_counted() -> None:
    text, counts = arrange(_store(10), 4, packing=True, padding=END, seed=0)
    assert sorted(ids for row in text for ids in row["input_ids"].tolist() if ids != END) == [*range(100, 110)]
    assert counts.truncated == 0
    for packing in (True, False):
        chats, counts = arrange(_store(10, 3, masked=True), 4, packing, padding=END, seed=0)
        assert [row["input_ids"].tolist()[:3] for row in chats] == [[100, 101, 102], [110, 111, 112]]
        assert counts.truncated == 1 and "1 documents cut off at data.sequence_length" in counts.describe_sequences()


def test_documents_alone_are_padded_to_the_longest_of_their_batch() -> None:
    sequences, _ = arrange(_store(3, 1, masked=True), 8, packing=False, padding=END, seed=0)
    batch = Batcher(END)([*sequences])
    assert batch["input_ids"].tolist() == [[100, 101, 102], [103, END, END]]
    assert batch["labels"].tolist() == [[100, -100, 102], [103, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert learned_labels(batch["labels"]) == 1  # the first of each row is learned from nothing
    assert Batcher(END, multiple=4)([*sequences])["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]
    assert {*Batcher(END)([sequences[0]])} == {"input_ids", "labels"}


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    config = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", vocab_size=320, use_cache=False, **config))


@pytest.mark.parametrize("masked", [False, True])
def test_packed_documents_have_the_loss_of_the_same_documents_in_a_padded_batch(
    llama: PreTrainedModel, masked: bool
) -> None:
    store = _store(9, 4, 7, 11, 5, masked=masked)
    packed, _ = arrange(store, 16, packing=True, padding=END, seed=0)
    alone, _ = arrange(store_in_memory([*_documents(store)]), 16, packing=False, padding=END, seed=0)
    batches = Batcher(END)([*packed]), Batcher(END)([*alone])
    assert "attention_mask" not in batches[0] and learned_labels(batches[0]["labels"]) == learned_labels(
        batches[1]["labels"]
    )
    losses, gradients = [], []
    for batch in batches:
        llama.zero_grad()
        loss = llama(**batch).loss
        loss.backward()
        losses.append(float(loss.detach()))
        gradients.append(llama.lm_head.weight.grad.clone())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-8)


def _documents(store: TokenStore) -> list[Document]:
    """The store's documents with a mask, so that each gets a sequence of its own."""
    learned = np.ones(len(store.ids), np.bool_) if store.learned is None else store.learned
    return [Document(store.ids[a:b], learned[a:b]) for a, b in zip(store.starts, store.ends, strict=True)]
