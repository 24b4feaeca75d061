"""Models of images, video and audio over ranks, which share their text, and the pictures and sounds of their towers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_multimodal import media_batch, text_batch, tiny_model, with_kinds
from torch import Tensor, distributed
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from ulysses_hybrids import OPS
from ulysses_models import grads_equal, grads_equal_as_wholes, packed_positions, registry
from ulysses_ranks import check, close, raises, rank, size

from models import EVERY_KERNEL
from veomni_core import bind
from veomni_core.errors import BindingError, ConfigError
from veomni_transformers.sequence import apply_context_parallel, apply_ulysses, divided_towers
from veomni_transformers.towers import run_every_tower, towers
from veomni_transformers.towers.host_metadata import HostMetadata

PICTURES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl_moe", "glm4v", "gemma3", "paligemma", "llava", "llava_next")
PICTURES += ("internvl", "mistral3", "idefics3", "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker")
SIZES = ((1, 4, 12), (1, 8, 4), (1, 4, 4))  # of two ranks the second computes features of positions on the first


def padded(batch: dict[str, Tensor], length: int = 0) -> dict[str, Tensor]:
    """``batch`` with padding at the end, to ``length`` or a multiple of the ranks."""
    ids = batch["input_ids"]
    missing = length - ids.shape[1] if length else -ids.shape[1] % size()
    given = {"attention_mask": torch.ones_like(ids), **batch}
    fill = {"labels": -100}
    return {
        name: F.pad(each, (0, missing), value=fill.get(name, 0)) if each.shape == ids.shape else each
        for name, each in given.items()
    }


def mixed_batch(model: Any, modality: str = "image") -> dict[str, Tensor]:
    """A row with a picture, and one of text alone, which is padded."""
    with_picture = padded(media_batch(model, modality))
    length = with_picture["input_ids"].shape[1]
    text = padded(with_kinds(model.config.model_type, text_batch(1, 9)), length)
    return {name: torch.cat([each, text[name]]) if name in text else each for name, each in with_picture.items()}


def across_ranks(model: Any, modality: str = "image") -> dict[str, Tensor]:
    """A row in the middle of which, where ranks' parts end, a picture is."""
    batch = media_batch(model, modality)
    before = with_kinds(model.config.model_type, text_batch(1, 2, seed=1))
    joined = {name: torch.cat([before[name], batch[name]], 1) for name in before}
    return padded({**batch, **joined})


def several(model: Any, modality: str = "image", sizes: Sequence[Sequence[int]] = SIZES) -> dict[str, Tensor]:
    """A row with media of these sizes, and text between them."""
    batches = [media_batch(model, modality, seed, each) for seed, each in enumerate(sizes)]
    joined: dict[str, Tensor] = {}
    for name, first in batches[0].items():
        found, of_text = [each[name] for each in batches], first.shape == batches[0]["input_ids"].shape
        if not of_text:  # pictures and sounds of the largest size, and zeros beyond their own
            most = [max(each.shape[place] for each in found) for place in range(first.dim())]
            ends = [[(0, most[place] - each.shape[place]) for place in range(1, first.dim())] for each in found]
            pads = [[way for end in reversed(each) for way in end] for each in ends]
            found = [F.pad(each, pad) for each, pad in zip(found, pads, strict=True)]
        joined[name] = torch.cat(found, 1 if of_text else 0)
    return padded(joined)


def equal_to_one_process(
    family: str,
    batch: dict[str, Tensor],
    ops: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float64,
    overlap: bool = False,
    prepare: Callable[[Any], Any] = lambda model: None,
    apply: Callable[..., Any] = apply_ulysses,
) -> None:
    """Loss, logits and the mean of the ranks' gradients are those of one process, in the towers too."""
    reference, model = tiny_model(family), tiny_model(family)
    prepare(reference), prepare(model)
    reference.config.get_text_config().use_cache = (
        False  # beside a cache transformers doesn't look for packed sequences
    )
    if dtype == torch.float64:  # which grouped matrix products don't know
        for each in (reference, model):
            each.set_experts_implementation("eager")
    if ops:
        bind(model, ops, registry=registry())
    if ops is OPS:  # transformers' own delta rule computes in float32
        bind(reference, ops, registry=registry())
    batch = {name: each.to(dtype) if each.is_floating_point() else each for name, each in batch.items()}
    wanted = reference.to(dtype)(**batch)
    wanted.loss.backward()
    with apply(model.to(dtype), overlap=overlap) as applied:
        assert f"p={size()}" in applied.describe()
        found = model(**batch)
        found.loss.backward()
    torch.testing.assert_close(found.loss, wanted.loss, rtol=1e-6, atol=0)
    if getattr(wanted, "aux_loss", None) is not None:
        torch.testing.assert_close(found.aux_loss, wanted.aux_loss, rtol=1e-6, atol=0)
    if not ops:
        kept = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
        close(applied.gather_outputs(found.logits, 1)[kept], wanted.logits[kept], "logits")
    grads_equal_as_wholes(model, reference)
    beside = {path for paths in towers(model).values() for path in paths}
    given = any(name in batch for name in ("pixel_values", "pixel_values_videos", "input_features"))
    learned = [name for name, each in model.named_parameters() if each.grad is not None and each.grad.any()]
    frozen = all(not each.requires_grad for name, each in model.named_parameters() if name.startswith(tuple(beside)))
    assert (given and not frozen) == any(name.startswith(tuple(beside)) for name in learned)


def of_pictures(family: str, ops: dict[str, Any] | None = None) -> None:
    model = tiny_model(family)
    equal_to_one_process(family, with_kinds(family, text_batch(2, 12)), ops)
    equal_to_one_process(family, across_ranks(model), ops)
    equal_to_one_process(family, mixed_batch(model), ops)


@check
def features_of_early_layers_are_added_on_the_rank_of_their_positions() -> None:
    of_pictures("qwen3_vl")


@check
def pictures_of_every_family() -> None:
    for family in PICTURES:
        of_pictures(family)


@check
def pictures_in_hybrids() -> None:
    for family in ("qwen3_5", "qwen3_5_moe"):
        of_pictures(family, OPS)
        equal_to_one_process(family, across_ranks(tiny_model(family), "video"), OPS)


@check
def video_and_sound() -> None:
    for family in ("qwen2_5_vl", "qwen3_vl"):
        equal_to_one_process(family, across_ranks(tiny_model(family), "video"))
    for family in ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"):
        equal_to_one_process(family, across_ranks(tiny_model(family), "audio"))


@check
def every_kernel_bound_in_a_model_of_pictures() -> None:
    one_process = {**EVERY_KERNEL, "attn_implementation": "sdpa"}
    for family in ("qwen3_vl_moe", "gemma3"):
        equal_to_one_process(family, mixed_batch(tiny_model(family)), one_process, torch.float32)


@check
def a_kernel_that_takes_lengths_in_a_decoder() -> None:
    ops = {"preset": "eager", "attn_implementation": {"*language_model": "by_lengths", "default": "sdpa"}}
    for family in ("qwen3_vl", "llava"):
        equal_to_one_process(family, mixed_batch(tiny_model(family)), ops, torch.float32)


@check
def what_towers_were_given_is_not_passed_on() -> None:
    model = tiny_model("qwen3_vl")
    batch = across_ranks(model)
    found = HostMetadata(model)(batch)
    assert {"image_cu_seqlens", "position_ids"} <= {*found}
    equal_to_one_process("qwen3_vl", {**batch, **found})


@check
def packed_text_with_positions_of_four_rows() -> None:
    batch = with_kinds("qwen3_vl", text_batch(1, 16))
    positions = packed_positions().expand(4, 1, -1)
    equal_to_one_process("qwen3_vl", {**batch, "position_ids": positions})


@check
def layers_and_towers_that_are_computed_again_in_backward() -> None:
    reference, model = (tiny_model("qwen3_vl").double() for _ in range(2))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    apply_ulysses(model)
    batch = across_ranks(model)
    batch["pixel_values"] = batch["pixel_values"].double()
    for each in (reference, model):
        each(**batch).loss.backward()
    grads_equal(model, reference)


@check
def pictures_of_several_sizes_on_their_ranks() -> None:
    equal_to_one_process("qwen3_vl", several(tiny_model("qwen3_vl")))


@check
def several_pictures_of_every_family() -> None:
    for family in PICTURES:
        sizes = SIZES if "depth" in dir(tiny_model(family).config.vision_config) else ((1, 4, 4),) * 3
        equal_to_one_process(family, several(tiny_model(family), "image", SIZES if family == "mistral3" else sizes))


@check
def several_videos_and_sounds() -> None:
    videos = ((3, 4, 4), (1, 4, 8))
    for family in ("qwen2_vl", "qwen2_5_vl", "qwen2_5_omni_thinker"):
        equal_to_one_process(family, several(tiny_model(family), "video", videos))
    batch = several(tiny_model("qwen3_vl"), "video", videos)  # whose positions ask for text between frames
    positions = torch.arange(batch["input_ids"].shape[1]).expand(3, 1, -1)
    equal_to_one_process("qwen3_vl", {**batch, "position_ids": positions})
    for family in ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"):
        equal_to_one_process(family, several(tiny_model(family), "audio", ((1, 1, 4), (1, 1, 2), (1, 1, 3))))


@check
def each_rank_runs_towers_on_its_part() -> None:
    model = tiny_model("qwen3_vl")
    given: list[int] = []
    model.model.visual.register_forward_pre_hook(lambda _, args, kwargs: given.append(len(args[0])), with_kwargs=True)
    batch, video = several(model), several(model, "video", ((8, 4, 4),))
    video["position_ids"] = torch.arange(video["input_ids"].shape[1]).expand(3, 1, -1)
    given.clear()
    state = apply_ulysses(model)
    assert state.describe().endswith("; image and video features divided over the ranks")
    found = HostMetadata(model)(batch)  # that of the whole, which no rank's part has
    for each in (batch, {**batch, **found}, video, media_batch_of_text()):
        model(**each)
    of_ranks: list[Any] = [None] * size()
    distributed.all_gather_object(of_ranks, given)
    parts = {2: [48, 48], 4: [16, 48, 32, 16]}[size()]  # of four ranks the first stands in with the smallest
    videos = [128 // size()] * size()
    assert of_ranks == [[part, part, of_video] for part, of_video in zip(parts, videos, strict=True)], of_ranks
    state.undo()
    model(**batch)
    assert given[-1] == 96
    for family, why in {
        "qwen3_omni_moe_thinker": "audio features whole on each rank (features of audios depend"
    }.items():
        assert why in apply_ulysses(tiny_model(family)).describe()

    def failing_on_the_last_rank(own: Any) -> Any:
        alone = rank() == size() - 1
        return lambda *given: replace(own(*given), why_not="no memory was left") if alone else own(*given)

    with replaced("division_of", failing_on_the_last_rank):
        said = apply_ulysses(tiny_model("qwen3_vl")).describe()
        assert said.count("no memory was left") == 2 and "divided over" not in said, said
        equal_to_one_process("qwen3_vl", batch)


def media_batch_of_text() -> dict[str, Tensor]:
    return with_kinds("qwen3_vl", padded(text_batch(1, 12)))


def frozen(model: Any) -> None:
    model.model.visual.requires_grad_(False)


def recomputing(model: Any) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": False})


@check
def divided_towers_that_are_frozen_computed_again_or_in_a_ring() -> None:
    batch = several(tiny_model("qwen3_vl"))
    sums: list[int] = []
    with replaced("_summed", lambda own: lambda *given: sums.append(1) or own(*given)):
        equal_to_one_process("qwen3_vl", batch, prepare=frozen)
        assert not sums
        equal_to_one_process("qwen3_vl", batch, prepare=recomputing)
        assert len(sums) == 2  # pooled features, and those of an early layer
    ids = batch["input_ids"]
    ringed = padded(batch, ids.shape[1] + -ids.shape[1] % (2 * size()))
    del ringed["attention_mask"]
    ringed["position_ids"] = torch.arange(ringed["input_ids"].shape[1]).expand(3, 1, -1)
    equal_to_one_process("qwen3_vl", ringed, apply=apply_context_parallel)


@check
def packed_rows_with_pictures() -> None:
    batch = several(tiny_model("qwen3_vl"))
    length = batch["input_ids"].shape[1]
    starts = torch.cat([torch.arange(each) for each in (7, length // 2, length - 7 - length // 2)])
    del batch["attention_mask"]
    equal_to_one_process("qwen3_vl", {**batch, "position_ids": starts.expand(4, 1, -1)})


@check
def faults_in_dividing_towers_are_seen() -> None:
    batch = several(tiny_model("qwen3_vl"))

    def of_one_rank(own: Any) -> Any:  # features that other ranks put among words get no gradient
        return lambda gradient, counts, group: gradient.split(counts)[rank()]

    faults: dict[str, list[Callable[[Any], Any]]] = {
        "_summed": [of_one_rank, lambda own: lambda *given: own(*given) * size()],
        "_gathered": [
            lambda own: lambda *given: own(*given).flip(0),
            lambda own: lambda *given: own(*given).detach() * 2,
        ],
    }
    for name, replacements in faults.items():
        for replacement in replacements:
            with replaced(name, replacement), pytest.raises(AssertionError):
                equal_to_one_process("qwen3_vl", batch)


@contextmanager
def replaced(name: str, replacement: Callable[[Any], Any]) -> Iterator[None]:
    own = getattr(divided_towers, name)
    setattr(divided_towers, name, replacement(own))
    try:
        yield
    finally:
        setattr(divided_towers, name, own)


@check
def groups_of_which_one_has_pictures_under_fsdp2() -> None:
    mesh = init_device_mesh("cpu", (2, size() // 2), mesh_dim_names=("dp", "sp"))
    reference, model = (tiny_model("qwen3_vl").double() for _ in range(2))
    batches = [several(model), padded(media_batch_of_text(), several(model)["input_ids"].shape[1])]
    for batch in batches:
        batch |= {name: each.double() for name, each in batch.items() if each.is_floating_point()}
        (reference(**batch).loss / 2).backward()
    apply_ulysses(model, mesh["sp"].get_group())
    run_every_tower(model)
    for layer in (*model.model.visual.blocks, model.model.visual, *model.model.language_model.layers, model):
        fully_shard(layer)
    model(**batches[mesh["dp"].get_local_rank()]).loss.backward()
    wanted = dict(reference.named_parameters())
    for name, each in model.named_parameters():
        close(each.grad.full_tensor(), wanted[name].grad, name)


@check
def a_decoder_of_which_not_every_argument_can_be_cut_is_refused() -> None:
    for family, text in (
        ("mllama", "MllamaTextModel) takes cross_attention_states, cross_attention_mask, full_text"),
        ("llama4", "it uses chunked attention"),
        ("qwen2_audio", "computes its loss itself"),
        ("whisper", "it has an encoder and a decoder"),
    ):
        raises(ConfigError, text, lambda family=family: apply_ulysses(tiny_model(family)))
    model = tiny_model("qwen3_vl")
    applied = apply_ulysses(model)
    raises(BindingError, "outside of the model", lambda: model.model.language_model(text_batch()["input_ids"]))
    applied.undo()
    # A decoder that shares its config with a module beside it, whose attention would see other heads of the same.
    model.model.after = copy.deepcopy(model.model.visual.blocks[0].attn)
    model.model.after.config = model.config.text_config
    raises(ConfigError, "model.after outside of its decoder model.language_model", lambda: apply_ulysses(model))
