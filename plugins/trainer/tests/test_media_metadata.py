"""A job's batches of pictures have what the model's towers would compute of them in forward."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from tiny_multimodal import media_batch, tiny_model

from veomni_trainer.data.batches import CHAT, Batcher
from veomni_transformers.towers.host_metadata import HostMetadata

TAKEN = ["input_ids", "pixel_values", "image_grid_thw", "mm_token_type_ids"]


class Processor:
    """Gives what the model's processor made of the pictures of a batch before."""

    def __init__(self, made):
        self._made = made
        self.loaded = SimpleNamespace(model_input_names=TAKEN)
        self.gives_positions = False

    def decoded(self, media):
        return []

    def inputs(self, texts, media, **options):
        return {name: self._made[name] for name in TAKEN}


def batches(model, metadata):
    made = media_batch(model)
    ids = made["input_ids"][0]
    chat = SimpleNamespace(text="", origin="rows.jsonl, row 1", media=())
    batcher = Batcher(0, processor=Processor(made), metadata=metadata)
    pictures = batcher([{"input_ids": ids, "labels": ids, CHAT: [(slice(0, len(ids)), chat)]}])
    words = torch.arange(3, 9)
    return pictures, batcher([{"input_ids": words, "labels": words}])


def test_positions_and_bounds_are_in_the_batch_and_the_loss_is_the_same():
    model = tiny_model("qwen2_5_vl")
    plain, _ = batches(model, None)
    pictures, words = batches(model, HostMetadata(model))
    added = {"position_ids", "image_cu_seqlens", "image_window_index", "image_position_ids"}
    assert added <= pictures.keys() and not added & plain.keys()
    assert words.keys() <= {*plain, "position_ids"} and not any(name.startswith("image_") for name in words)
    assert torch.equal(model(**pictures).loss, model(**plain).loss)
    shifted = {**pictures, "position_ids": 3 * pictures["position_ids"]}
    assert not torch.equal(model(**shifted).loss, model(**plain).loss)  # forward takes them from the batch
