"""Which hybrid models may train on packed documents, unbound and bound: every type, by value and by gradient."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, DataCollatorWithFlattening

from hybrid_models import LENGTHS, TYPES, hybrid, tokens
from models import step
from tiny_models import tiny_model
from veomni_core import bind
from veomni_core.errors import ConfigError, PackedSequencesError
from veomni_trainer.setup.packing import check_packing

KERNELS = {
    "preset": "eager",
    "causal_conv1d_implementation": "auto",
    "chunk_gated_delta_rule_implementation": "auto",
    "kda_implementation": "auto",
    "mamba2_scan_implementation": "auto",
    "selective_scan_implementation": "auto",  # which mixers of Mamba 1 don't tell where a sequence begins
}
# Beside attention, only convolutions, delta rules and scans of Mamba 2 mix along the sequence here.
RIGHT = {
    *("bailing_hybrid", "kimi_linear"),
    *("lfm2", "lfm2_moe", "lfm3", "lfm3_vl"),
    *("olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
    *("qwen4_exp", "qwen4_exp_text"),
    *("bamba", "falcon_h1", "granitemoehybrid", "nemotron_h", "zamba2"),
}
DROPPED = r"calls its \w+ without saying where a sequence begins"
STATE = "what it carries along the sequence is computed by its own code"
# What mixes along the sequence in the others, and gets no boundaries.
REFUSED = {
    "falcon_mamba": rf"mixer \(FalconMambaMixer\) would mix them: {STATE}",
    "glm5_next": r"\(Glm5NextTextModel\) would mix them: the masks that it gives to its attention",
    **dict.fromkeys(
        ("inkling_text", "inkling2_text", "inkling2_text of sliding layers"), f"would mix them: .*{DROPPED}"
    ),
    "jamba": rf"mamba \(JambaMambaMixer\) would mix them: {STATE}",
    "mamba": rf"mixer \(MambaMixer\) would mix them: {STATE}",
    "mamba2": r"\(Mamba2ForCausalLM\) takes no position_ids",
    "qwen4_exp_text with n-grams": rf"ple \(Qwen4ExpTextPLELayer\) would mix them: {STATE}",
    "zamba": rf"mamba \(ZambaMambaMixer\) would mix them: {STATE}",
    "zaya": rf"qkv_proj \(ZayaCCAProjection\) would mix them: {STATE}",
}
ALL = (*TYPES, "zaya")  # whose convolutions no site knows


@pytest.fixture(scope="module")
def bound(request):
    """A bound model of the parameter's type. Finding its sites takes far longer than a step, so questions share it."""
    model = hybrid(request.param)
    bind(model, KERNELS)
    return model


# What layers of transformers that mix positions by other means than attention have in their code.
MIXERS = re.compile(r"update_conv_state|update_recurrent_state|A_log|causal_conv1d_fn")


def test_every_type_of_transformers_with_such_layers_is_listed():
    folder = Path(transformers.models.__file__).parent
    found = {path.parent.name for path in folder.glob("*/modeling_*.py") if MIXERS.search(path.read_text("utf-8"))}
    assert found <= {type(hybrid(name)).__module__.split(".")[-2] for name in ALL}
    assert {*ALL} == RIGHT | REFUSED.keys() and not RIGHT & REFUSED.keys()


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("model_type", ALL)
def test_a_type_may_be_packed_if_kernels_read_its_boundaries(model_type):
    model = hybrid(model_type)
    with pytest.raises(ConfigError, match=r"data\.packing: "):
        check_packing(model, batch_size=2)
    with bind(model, KERNELS):
        if model_type in RIGHT:
            check_packing(model, batch_size=2)
        else:
            with pytest.raises(ConfigError, match=r"data\.packing: "):
                check_packing(model, batch_size=2)


POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])[None]
NUMBERS = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))[None]
ENDS = torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32)
LONGEST = {"max_length_q": max(LENGTHS), "max_length_k": max(LENGTHS)}


def flattened(**options):
    """What transformers' collator makes of the documents."""
    documents = [{"input_ids": ids.tolist()} for ids in tokens(1, sum(LENGTHS))[0].split(LENGTHS)]
    batch = DataCollatorWithFlattening(return_tensors="pt", **options)(documents)
    return {name: value for name, value in batch.items() if name not in ("input_ids", "labels")}


# Every way in which a caller says where documents are packed.
WAYS = {
    "position_ids": {"position_ids": POSITIONS},
    "cu_seq_lens": {"position_ids": POSITIONS, "cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS, **LONGEST},
    "seq_idx": {"position_ids": POSITIONS, "seq_idx": NUMBERS.int()},
    "the collator": flattened(),
    "the collator, with bounds": flattened(return_flash_attn_kwargs=True),
    "the collator, with numbers": flattened(return_seq_idx=True),
    "the collator, with both": flattened(return_flash_attn_kwargs=True, return_seq_idx=True),
}


def assert_apart(model, row, inputs, lengths):
    """The logits of packed rows, and every gradient of them, are those of the documents alone."""
    packed = model(row, **inputs).logits
    parts = [each.split(lengths, dim=1) for each in row.split(1)]
    separate = torch.cat([torch.cat([model(part).logits for part in parts_of_row], 1) for parts_of_row in parts])
    torch.testing.assert_close(packed, separate, rtol=1e-4, atol=1e-5)
    packed.square().mean().backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    separate.square().mean().backward()
    for name, gradient in found.items():
        wanted = model.get_parameter(name).grad
        assert (gradient - wanted).norm() <= 1e-4 * wanted.norm() + 1e-7, name


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bound", sorted(RIGHT), indirect=True)
def test_packed_equals_separate_in_logits_and_every_gradient(bound, way, monkeypatch):
    monkeypatch.setattr(bound.config, "use_cache", False, raising=False)
    bound.zero_grad()
    assert_apart(bound, tokens(1, sum(LENGTHS)), WAYS[way], LENGTHS)


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("bound", sorted(RIGHT), indirect=True)
def test_rows_of_a_batch_are_packed_each_by_its_positions(bound):
    first, second = POSITIONS, torch.arange(sum(LENGTHS))[None]
    row = tokens(2, sum(LENGTHS))
    packed = bound(row, position_ids=torch.cat([first, second])).logits
    separate = torch.cat([bound(part, use_cache=False).logits for part in row[:1].split(LENGTHS, dim=1)], dim=1)
    torch.testing.assert_close(packed[:1], separate, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(packed[1:], bound(row[1:], use_cache=False).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bound, words", REFUSED.items(), ids=REFUSED, indirect=["bound"])
def test_what_no_kernel_keeps_apart_is_refused_by_name(bound, words, way):
    with pytest.raises(PackedSequencesError, match=words):
        bound(tokens(1, sum(LENGTHS)), **WAYS[way])


def test_an_eager_layer_refuses_packed_sequences_and_nothing_else():
    model, row = hybrid("bamba"), tokens(1, sum(LENGTHS))
    wanted = model(row, use_cache=False).logits
    bind(model, {**KERNELS, "mamba2_scan_implementation": "eager"})
    words = r"model\.layers\.0\.mamba \(BambaMixer\) would mix them: its mamba2_scan stays eager"
    with pytest.raises(PackedSequencesError, match=words):
        model(row, position_ids=POSITIONS)
    torch.testing.assert_close(model(row, use_cache=False).logits, wanted, rtol=1e-5, atol=1e-6)
    found = model(row, position_ids=torch.arange(sum(LENGTHS))[None], use_cache=False).logits
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "inputs, words",
    [
        ({"position_ids": POSITIONS, "use_cache": True}, "use_cache=True asks for a cache"),
        ({"cu_seq_lens_q": ENDS[:-1]}, "goes from 0 to 8; the input has 16 positions"),
        ({"cu_seq_lens_q": torch.tensor([0, 9, 5, 16])}, "goes from 0 to 16, and back in between"),
        ({"cu_seq_lens_q": ENDS.float()}, r"cu_seq_lens_q is torch\.float32 \[5\]; give integers"),
        ({"seq_idx": NUMBERS[:, :-1]}, r"seq_idx is \[1, 15\], and the input has 1 rows of 16 positions"),
    ],
)
@pytest.mark.parametrize("bound", ["qwen3_next"], indirect=True)
def test_boundaries_that_can_not_be_are_refused(bound, inputs, words):
    with pytest.raises(PackedSequencesError, match=words):
        bound(tokens(1, sum(LENGTHS)), **inputs)


def test_bounds_of_one_row_are_refused_for_two():
    model = hybrid("lfm2")
    bind(model, KERNELS)
    with pytest.raises(PackedSequencesError, match="the boundaries of one packed row, and the batch has 2"):
        model(tokens(2, sum(LENGTHS)), cu_seq_lens_q=ENDS)


@pytest.mark.parametrize(
    "attention, words",
    [
        ("eager", r"\(GraniteMoeHybridModel\) would mix them: the masks that it gives to its attention"),
        ("sdpa", "sdpa keeps packed sequences apart by a mask alone, and the model gave it none"),
    ],
)
def test_masks_of_a_model_that_get_no_positions_are_refused(attention, words):
    """transformers builds them of padding alone in this type, where it has layers of attention."""
    layers = {"layer_types": ["mamba", "attention"], "num_hidden_layers": 2}
    options = {**hybrid("granitemoehybrid").config.to_dict(), **layers, "layers_block_type": layers["layer_types"]}
    config = AutoConfig.for_model(options.pop("model_type"), **options)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    bind(model, {**KERNELS, "attn_implementation": attention})
    with pytest.raises(PackedSequencesError, match=words):
        model(tokens(1, sum(LENGTHS)), position_ids=POSITIONS, use_cache=False)


def test_generation_goes_on_as_before():
    model, ids = hybrid("qwen3_next").eval(), tokens(2, 7)
    wanted = model.generate(ids, max_new_tokens=5, do_sample=False)
    with bind(model, KERNELS, training=False):
        assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), wanted)


def test_models_of_attention_alone_keep_their_forward():
    model = tiny_model("llama", torch.float32)
    forward = type(model.model).forward
    with bind(model, {"preset": "auto", "attn_implementation": "eager"}):
        assert type(model.model).forward is forward


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("model_type", ["bamba", "kimi_linear", "olmo_hybrid", "qwen3_5_text", "qwen3_next"])
def test_with_all_its_kernels_a_hybrid_trains_as_the_eager_one(model_type):
    model, ids = hybrid(model_type), tokens(2, 13)
    wanted = step(model, ids)
    with bind(model, {**KERNELS, "rms_norm_gated_implementation": "auto", "rms_norm_implementation": "auto"}):
        found = step(model, ids)
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-5, atol=1e-6)
    for name, gradient in wanted[1].items():
        assert (found[1][name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-7, name


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("model_type", ["lfm2", "qwen3_next", "bamba", "falcon_h1", "kimi_linear"])
def test_plan_and_receipt_say_that_eager_code_mixes_packed_sequences(model_type):
    model, plain = hybrid(model_type), hybrid(model_type)
    said = "packed sequences: transformers' own code mixes them; bound, they stay apart or are refused"
    with bind(model, KERNELS) as binding:
        reading = {decision.site.op_name for decision in binding.plan.decisions if decision.bound}
        assert reading <= {"causal_conv1d", "chunk_gated_delta_rule", "kda", "mamba2_scan"} and reading
        for op in binding.plan.ops:
            assert any(said in each for each in op.left_out) == (op.op_name in reading)
        assert "Not proven: " in binding.receipt.table() and said in binding.plan.table()
        row, packed = tokens(1, sum(LENGTHS)), {"position_ids": POSITIONS, "use_cache": False}
        with torch.no_grad():
            apart, mixed = model(row, **packed).logits, plain(row, **packed).logits
        assert (apart - mixed).norm() > 1e-3 * mixed.norm()
