"""Names that are not known are answered by those that mean the same, contain the name, or are spelt alike."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from veomni_conformance.cli.names import check_device, find_op
from veomni_core import Hardware, OpsConfig, discover
from veomni_core.cli.app import build_app
from veomni_core.errors import UnknownNameError, did_you_mean, suggest
from veomni_ops.synonyms import SYNONYMS

FLASH = "'flash_attention_2', 'flash_attention_3' or 'flash_attention_4'"


@pytest.mark.parametrize(
    "name, known, hint",
    [
        ("liger", ["eager", "liger_kernel"], "Did you mean 'liger_kernel'?"),
        ("liger", ["veomni-liger", "veomni-quack"], "Did you mean 'veomni-liger'?"),
        ("batch", ["train.batch_size", "train.steps"], "Did you mean 'train.batch_size'?"),
        ("seed", ["train.learning_rate", "train.seed"], "Did you mean 'train.seed'?"),
        ("train.files", ["train.steps", "data.files"], "Did you mean 'data.files'?"),
        ("FP16", ["float16", "float32"], "Did you mean 'float16'?"),
        ("Flash-Attention-2", ["flash_attention_2"], "Did you mean 'flash_attention_2'?"),
        ("lr", ["auto", "eager"], ""),
        ("veomni", ["veomni-a", "veomni-b", "veomni-c", "veomni-d", "veomni-e"], ""),
    ],
)
def test_suggestions(name, known, hint):
    assert suggest(name, known) == hint


def test_without_a_near_name_all_are_listed():
    assert did_you_mean("zzz", ["b", "a"]) == "Known: a, b."
    assert did_you_mean("zzz", []) == "There are none."


def test_no_word_is_a_synonym_of_itself():
    assert not [word for word, meanings in SYNONYMS.items() if word in meanings or not meanings]


@pytest.mark.parametrize(
    "config, hint",
    [
        ({"attn_implementation": "flash"}, FLASH),
        ({"attn_implementation": "fa3"}, "'flash_attention_3'"),
        ({"rms_norm_implementation": "liger"}, "'liger_kernel'"),
        ({"moe_implementation": "quack"}, "'fused_quack'"),
        ({"rope": "torch"}, "'rotary_pos_emb_implementation'"),
        ({"moe": "eager"}, "'moe_implementation'"),
        ({"preset": "default"}, "'auto'"),
    ],
)
def test_values_and_fields_of_a_config(registry, config, hint):
    with pytest.raises(UnknownNameError) as caught:
        OpsConfig.from_dict(config, registry)
    assert f"Did you mean {hint}?" in str(caught.value)


@pytest.mark.parametrize(
    "look_up, hint",
    [
        (lambda registry: find_op(registry, "rope"), "'rotary_pos_emb'"),
        (lambda registry: find_op(registry, "moe"), "'moe_experts'"),
        (lambda registry: registry.plugin("triton"), "'veomni-triton' or 'veomni-triton-moe'"),
        (lambda registry: check_device(registry, "gpu"), "'cuda'"),
        (lambda registry: check_device(registry, "ascend:1"), "'npu'"),
        (lambda registry: Hardware.named("h20"), "'h200'"),
        (lambda registry: Hardware.named("hopper"), "'h100' or 'h200'"),
        (lambda registry: Hardware.named("4090"), "'rtx4090'"),
    ],
)
def test_names_on_the_command_line(look_up, hint):
    with pytest.raises(UnknownNameError) as caught:
        look_up(discover())
    assert f"Did you mean {hint}?" in str(caught.value)


@pytest.mark.parametrize("verb, hint", [("ls", "'list'"), ("explan", "'explain'"), ("check", "'verify' or 'plan'")])
def test_commands(verb, hint):
    result = CliRunner().invoke(build_app(), [verb])
    assert result.exit_code == 2 and f"No such command '{verb}'. Did you mean {hint}?" in " ".join(
        result.output.split()
    )


def test_verify_names_the_device_and_the_dtype_that_were_meant():
    for arguments, hint in ((["--device", "gpu:0"], "'cuda'"), (["--dtype", "bf16"], "'bfloat16'")):
        result = CliRunner().invoke(build_app(), ["verify", "veomni-torch", *arguments])
        assert isinstance(result.exception, UnknownNameError) and f"Did you mean {hint}?" in str(result.exception)
