"""What towers read back from the device is computed on the host; binding adds no such reading."""

from __future__ import annotations

import re
import sys

import pytest
import torch
from tiny_multimodal import media_batch, text_batch, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from veomni_core import bind
from veomni_transformers.towers.host_metadata import HostMetadata

FAMILIES = [
    "qwen2_5_vl",
    *(pytest.param(each, marks=pytest.mark.thorough) for each in ("qwen2_vl", "qwen3_vl_moe", "glm4v")),
]
_WAITING = ("_local_scalar_dense", "nonzero", "unique", "is_nonzero", "aten.equal")


class Waits(TorchDispatchMode):
    """Counts the operators that would wait for a device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += any(word in str(function) for word in _WAITING)
        return function(*args, **(kwargs or {}))


def waits(model, batch):
    with Waits() as seen:
        loss = model(**batch).loss
        loss.backward()
    return seen.count, loss


@pytest.mark.parametrize("family", FAMILIES)
def test_a_forward_with_what_the_host_computed_waits_less_and_gives_the_same(family):
    model = tiny_model(family)
    batch = media_batch(model)
    added = HostMetadata(model)(batch)
    assert {"position_ids", "image_cu_seqlens", "image_position_ids"} <= added.keys()
    before, wanted = waits(model, batch)
    after, loss = waits(model, {**batch, **added})
    assert after < before
    assert torch.equal(loss, wanted)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_bound_step_waits_no_more_often_than_an_eager_one(family):
    model = tiny_model(family)
    batch = media_batch(model)
    batch |= HostMetadata(model)(batch)
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])  # without it, positions of three rows are looked at
    eager, _ = waits(model, batch)
    with bind(model, {"preset": "auto"}):
        bound, _ = waits(model, batch)
    assert bound <= eager


def test_text_alone_and_models_of_text_alone_need_nothing_of_towers():
    model = tiny_model("gemma3")
    assert HostMetadata(model)(text_batch()) == {}
    assert HostMetadata(model)(media_batch(model)) == {}


# Where transformers' own forwards read numbers back, whatever they are given: whether there are as many features of
# pictures as placeholders, and how many belong to each picture; whether a batch has padding; and at which bounds a
# tower's attention splits its patches, for kernels that don't take the bounds.
OF_TRANSFORMERS = {
    *("get_placeholder_mask", "torch_compilable_check", "get_image_features", "_ignore_causal_mask_sdpa"),
    *("forward of Qwen2_5_VLVisionAttention", "forward of Qwen3VLVisionAttention"),
}


@pytest.mark.parametrize(
    "family", ["qwen2_5_vl", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("qwen3_vl", "gemma3"))]
)
def test_no_forward_of_a_bound_model_waits_for_the_device_beyond_transformers_own_checks(family):
    model = tiny_model(family)
    batch = {**media_batch(model)}
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    added = HostMetadata(model)(batch)
    with bind(model, {"preset": "auto"}) as binding:
        assert binding.active
        assert readers(model, {**batch, **added}) <= OF_TRANSFORMERS
        assert (readers(model, batch) <= OF_TRANSFORMERS) == (not added)


def readers(model, batch):
    """The functions in which a step reads numbers of tensors, for which a device would have to finish."""
    seen = set()

    def noting(own):
        def noted(tensor, *args, **kwargs):
            seen.add(_reader())
            return own(tensor, *args, **kwargs)

        return noted

    with pytest.MonkeyPatch.context() as patch:
        for name in ("item", "tolist", "nonzero", "__bool__", "__int__", "__float__", "__index__"):
            patch.setattr(torch.Tensor, name, noting(getattr(torch.Tensor, name)))
        model(**batch).loss.backward()
    return seen


def _reader():
    """The innermost function of transformers, or of these distributions, that is running; with its module's class."""
    frame = sys._getframe(2)
    while not re.search(r"/(veomni_|transformers/)", frame.f_code.co_filename) or "<" in frame.f_code.co_name:
        frame = frame.f_back
    name, self = frame.f_code.co_name, frame.f_locals.get("self")
    return name if name != "forward" else f"forward of {type(self).__name__}"
