"""FSDP2 over two ranks of which one has an image and the other has none: the same gradients as in one process."""

from __future__ import annotations

import pytest
import torch
from tiny_multimodal import CONFIGS, media_batch, text_batch, tiny_model

from distributed import run_ranks
from veomni_core import bind
from veomni_core.changes.transformation import transformations_of
from veomni_core.errors import BindingError
from veomni_transformers.towers import every_tower, run_every_tower
from veomni_transformers.towers.feature_calls import feature_calls, read_tensors
from veomni_transformers.towers.own_calls import ALONE, own_calls
from veomni_transformers.towers.smallest_input import smallest_input

# Steps as what rank 0 and rank 1 have. The reference is the mean of both losses in one process.
COMPARED = """
    import copy
    from torch.distributed.fsdp import fully_shard
    from tiny_multimodal import media_batch, text_batch, tiny_model, with_kinds
    from veomni_core import bind
    from veomni_transformers.towers import run_every_tower, towers

    rank = torch.distributed.get_rank()
    torch.set_num_threads(1)
    WITH_HIDDEN_STATES = ("llava", "llava_next", "mistral3")  # transformers finds none in a tower that is a unit

    def batch(model_type, what, seed):
        if what == "text":
            return with_kinds(model_type, text_batch(1, 10, seed))
        return media_batch(tiny_model(model_type), what, seed)

    def by_hand(model_type, **settings):
        model = tiny_model(model_type)
        for paths in towers(model).values():
            for path in paths:
                if isinstance(part := dict(model.named_modules()).get(path), torch.nn.Module):
                    for layer in getattr(part, "blocks", getattr(part, "layers", ())):
                        fully_shard(layer, **settings)
                    if model_type not in WITH_HIDDEN_STATES:
                        fully_shard(part, **settings)
        decoder = model.get_decoder()
        for layer in getattr(decoder, "model", decoder).layers:  # Llama 4's has a head
            fully_shard(layer, **settings)
        fully_shard(model, **settings)
        return model

    def recomputing(model_type):
        model = by_hand(model_type)
        model.gradient_checkpointing_enable()
        return model

    def frozen(model_type):
        model = by_hand(model_type)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("vis" not in name)
        return model

    def in_bfloat16(model_type):
        from torch.distributed.fsdp import MixedPrecisionPolicy

        model = by_hand(model_type, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        run_every_tower(model)
        model(**batch(model_type, ("image", "text")[rank], 0)).loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None and parameter.grad.full_tensor().isfinite().all(), name
        print(model_type, "is equal")

    def by_transformers(model_type):
        import tempfile
        from transformers.distributed import DistributedConfig

        folder = [tempfile.mkdtemp()] if rank == 0 else [None]
        torch.distributed.broadcast_object_list(folder)
        if rank == 0:
            tiny_model(model_type).save_pretrained(folder[0])
        torch.distributed.barrier()
        kind = type(tiny_model(model_type))
        return kind.from_pretrained(folder[0], distributed_config=DistributedConfig(fsdp_size=2)).train()

    def compare(model_type, steps, make=by_hand, bound=False):
        model, whole = make(model_type), tiny_model(model_type)
        towered = bind(model, {{"preset": "auto"}}) if bound else run_every_tower(model)
        for number, step in enumerate(steps):
            batches = [batch(model_type, what, 10 * number + of) for of, what in enumerate(step)]
            losses = [whole(**each).loss for each in batches]
            torch.stack(losses).mean().backward()
            loss = model(**batches[rank]).loss
            torch.testing.assert_close(loss, losses[rank], rtol=1e-4, atol=1e-5)
            loss.backward()
            for (name, mine), (_, wanted) in zip(model.named_parameters(), whole.named_parameters(), strict=True):
                if wanted.grad is None or not mine.requires_grad:
                    assert mine.grad is None, (model_type, step, name)
                else:
                    assert mine.grad is not None, (model_type, step, name)
                    found = mine.grad.full_tensor()
                    assert torch.allclose(found, wanted.grad, rtol=1e-3, atol=1e-5), (model_type, step, name)
            model.zero_grad()
            whole.zero_grad()
        print(model_type, "is equal")

    {calls}
"""
OWN = ("mllama", "llama4", "qwen2_audio")  # whose forwards run towers, or projectors, themselves
BOTH = '[("image", "text"), ("text", "text"), ("text", "image")]'


def ranks(*calls: str) -> None:
    outputs = run_ranks(COMPARED.format(calls="\n    ".join(calls)))
    assert all(output.count("is equal") == len(calls) for output in outputs)


def test_one_rank_has_an_image_and_the_other_has_none():
    ranks(f'compare("qwen3_vl", {BOTH})', f'compare("llava", {BOTH}, bound=True)')


@pytest.mark.thorough
@pytest.mark.parametrize("bound", [False, True])
def test_every_family_s_tower_runs(bound):
    types = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl_moe", "qwen3_5", "glm4v", "gemma3", "paligemma", "llava_next"]
    types += ["qwen3_5_moe", "internvl", "mistral3", "idefics3", "mllama", "llama4"]
    sounds = BOTH.replace("image", "audio")
    ranks(
        *(f'compare("{model_type}", {BOTH}, bound={bound})' for model_type in types),
        f'compare("qwen2_audio", {sounds}, bound={bound})',
    )


@pytest.mark.thorough
def test_kinds_of_inputs_run_in_the_order_of_the_code():
    steps = '[("audio", "image"), ("video", "audio"), ("text", "video"), ("image", "video")]'
    ranks(*(f'compare("{model_type}_thinker", {steps})' for model_type in ("qwen2_5_omni", "qwen3_omni_moe")))


@pytest.mark.thorough
def test_layers_may_be_recomputed_frozen_or_in_bfloat16():
    once = '[("image", "text"), ("text", "image")]'
    ranks(
        f'compare("qwen3_vl", {once}, recomputing)',
        f'compare("qwen3_vl", {once}, frozen)',
        'in_bfloat16("qwen3_vl")',
        'in_bfloat16("internvl")',
    )


@pytest.mark.thorough
def test_transformers_engine_shards_it():
    ranks(f'compare("qwen3_vl", {BOTH}, by_transformers)', f'compare("gemma3", {BOTH}, by_transformers, bound=True)')


@pytest.mark.thorough
def test_where_a_tower_can_not_run_without_input_all_ranks_say_so():
    body = COMPARED.format(
        calls="""
    from veomni_core.errors import ConfigError
    from veomni_transformers.towers import every_tower
    every_tower.own_calls = lambda module, call: ((), "no part of it takes such inputs")
    model = by_hand("mllama")
    bind(model, dict(preset="eager"))
    try:
        model(**(batch("mllama", "image", 0) if rank == 0 else text_batch(1, 10)))
    except ConfigError as error:
        print(error)"""
    )
    for output in run_ranks(body):
        assert "some ranks have pixel_values and others have none, and MllamaModel is sharded" in output
        assert "can't run without an input (no part of it takes such inputs)" in output


@pytest.mark.thorough
def test_a_forward_that_runs_its_towers_itself():
    """Mllama's decoder has layers that text alone passes over; they are recomputed, and above a frozen tower."""
    sounds = BOTH.replace("image", "audio")
    ranks(
        *(f'compare("mllama", {BOTH}, {make})' for make in ("recomputing", "frozen", "by_transformers")),
        'in_bfloat16("mllama")',
        *(f'compare("qwen2_audio", {sounds}, {make})' for make in ("recomputing", "by_transformers")),
    )


@pytest.mark.parametrize("model_type", OWN)
def test_what_runs_for_a_medium_alone_has_the_weights_that_text_does_not_reach(model_type):
    model = tiny_model(model_type).eval()
    ((path, (call,)),) = feature_calls(model)
    module = model.get_submodule(path)
    found, why_not = own_calls(module, call)
    assert not why_not
    text, whole = (_learned(model, batch) for batch in (text_batch(), media_batch(model, call.modality)))
    model.zero_grad()
    zeros = {}
    for each in found:
        tensors = each.run(module.get_submodule(each.path), zeros)
        zeros[ALONE] = sum(tensor.sum() for tensor in tensors)
    zeros[ALONE].backward()
    reached = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert reached == whole - text and reached


def _learned(model, batch):
    model.zero_grad()
    model(**batch).loss.backward()
    return {name for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("model_type", [each for each in CONFIGS if each not in (*OWN, "whisper")])
def test_the_smallest_input_makes_features_as_a_real_one_does(model_type):
    model = tiny_model(model_type)
    ((path, calls),) = feature_calls(model)
    module = model.get_submodule(path)
    for call in calls:
        inputs, why_not = smallest_input(module, call)
        assert not why_not
        real = {name: value for name, value in media_batch(model, call.modality).items() if name in inputs}
        assert _reached(model, module, call, real) == _reached(model, module, call, inputs)


def _reached(model, module, call, inputs):
    """The parameters that get a gradient from the features of ``inputs``."""
    model.zero_grad()
    output = getattr(module, call.method)(**inputs)
    torch.autograd.backward([each.sum() for each in read_tensors(output, call.field)])
    return {name for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_it_is_undone_and_a_binding_has_it(monkeypatch):
    model = tiny_model("llava")
    batch = media_batch(model)
    before = model(**batch).loss
    state = run_every_tower(model)
    with pytest.raises(BindingError, match="runs every tower already"):
        run_every_tower(model)
    torch.testing.assert_close(model(**batch).loss, before, rtol=0, atol=0)
    state.undo()
    assert not transformations_of(model) and "in_step" not in type(model.model).forward.__code__.co_name
    with bind(model, {"preset": "eager"}):
        assert type(model.model).forward.__code__.co_name == "in_step"
    with pytest.raises(BindingError, match=r"has no tower that can run without an input \(none is called\)"):
        run_every_tower(tiny_model("whisper"))
    monkeypatch.setattr(every_tower, "own_calls", lambda *_: ((), "no part of it takes such inputs"))
    with pytest.raises(BindingError, match=r"\(its forward runs multi_modal_projector besides: no part of it takes"):
        run_every_tower(tiny_model("llama4"))
