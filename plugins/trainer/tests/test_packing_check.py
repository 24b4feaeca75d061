"""Which models keep packed documents apart: asked of the models themselves, by value."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from veomni_core import bind
from veomni_core.errors import ConfigError
from veomni_trainer.data.packing import pack
from veomni_trainer.setup.packing import check_packing
from veomni_transformers.packed.boundaries import boundaries_in
from veomni_transformers.packed.document_gradients import first_module_that_sees_others

_SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "vocab_size": 320,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "shared_expert_intermediate_size": 16,
}
_RIGHT: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3_moe": _EXPERTS,
    "gemma3_text": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
}
_MIXING: dict[str, tuple[dict[str, Any], str]] = {
    "qwen3_next": ({**_EXPERTS, **_LINEAR}, "model.layers.0.linear_attn"),
    "falcon_h1": ({**_MAMBA, "mamba_d_ssm": 64}, "model.layers.0.mamba"),
    "bamba": ({**_MAMBA, "attn_layer_indices": [1]}, "model.layers.0.mamba"),
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, "model.layers.0.conv"),
}


# Of a hybrid, what mixes along the sequence beside attention.
_KERNELS = {
    "preset": "eager",
    "attn_implementation": "sdpa",
    "causal_conv1d_implementation": "auto",
    "chunk_gated_delta_rule_implementation": "auto",
}
_AND_SCANS = {**_KERNELS, "mamba2_scan_implementation": "auto"}


def _model(model_type: str, attention: str = "sdpa", dtype: str = "float32", **config: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    made = AutoConfig.for_model(model_type, **{**_SMALL, **config})
    return AutoModelForCausalLM.from_config(made, attn_implementation=attention, dtype=dtype)


@pytest.mark.thorough(one_per=["attention"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("model_type", [*_RIGHT])
def test_models_of_attention_keep_documents_apart(model_type: str, attention: str, dtype: str) -> None:
    model = _model(model_type, attention, dtype, **_RIGHT[model_type])
    before = torch.get_rng_state()
    check_packing(model, batch_size=2)
    assert model.training and torch.equal(torch.get_rng_state(), before)


@pytest.mark.thorough(one_per=["dtype"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model_type", [*_MIXING])
def test_models_that_mix_along_the_sequence_are_refused_by_their_first_module_that_does(
    model_type: str, dtype: str
) -> None:
    config, module = _MIXING[model_type]
    with pytest.raises(ConfigError, match=rf"can't keep packed documents apart. The output of {module}\.\w+ \("):
        check_packing(_model(model_type, dtype=dtype, **config), batch_size=2)


@pytest.mark.thorough(one_per=["dtype"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model_type", ["qwen3_next", "lfm2", "bamba", "falcon_h1"])
def test_bound_hybrids_keep_documents_apart_in_every_row(model_type: str, dtype: str) -> None:
    model = _model(model_type, dtype=dtype, **_MIXING[model_type][0])
    with bind(model, _AND_SCANS):
        check_packing(model, batch_size=2)
    with pytest.raises(ConfigError, match=r"Write data\.packing: false"):
        check_packing(model, batch_size=2)


@pytest.mark.parametrize("model_type", ["bamba", "falcon_h1"])
def test_a_layer_that_stays_eager_is_named(model_type: str) -> None:
    model = _model(model_type, **_MIXING[model_type][0])
    words = r"model\.layers\.0\.mamba \(\w+\) would mix them: its mamba2_scan stays eager"
    with bind(model, _KERNELS), pytest.raises(ConfigError, match=words):
        check_packing(model, batch_size=1)


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model_type", ["bamba", "falcon_h1"])
def test_a_state_that_is_carried_over_is_seen_however_little_it_does(model_type: str, dtype: str) -> None:
    """Without a kernel the scan knows no boundaries, and what a fresh layer's state adds is smaller than rounding."""
    model = _model(model_type, dtype=dtype, **_MIXING[model_type][0]).eval()
    model.config.use_cache = False
    ids = torch.randint(320, (1, 12), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(7), torch.arange(5)])[None]
    told = boundaries_in({"input_ids": ids, "position_ids": positions})
    del told["seq_idx"]  # transformers' own scan refuses that, and doesn't see the others
    with bind(model, _KERNELS), torch.no_grad():
        mixer = model.model.layers[0].mamba
        hidden = model.model.layers[0].input_layernorm(model.model.embed_tokens(ids))
        together, alone = mixer(hidden, **told)[:, 7:], mixer(hidden[:, 7:])
        assert (together - alone).norm() <= 1e-3 * alone.norm()
        # As if nothing refused what the eager scan mixes, so that only the check is asked.
        model.model.forward = type(model.model).forward.__wrapped__.__get__(model.model)
        found = first_module_that_sees_others(model, (7, 5), {"input_ids": ids, "position_ids": positions, **told})
        assert found is not None and found[0].startswith("model.layers.0.mamba")


@pytest.mark.thorough
@pytest.mark.parametrize("rows_together", [False, True])
def test_a_packed_job_of_a_bound_hybrid_has_the_losses_of_its_documents_alone(
    rows_together: bool,
    job_data: dict[str, Any],
    train: Callable[..., bool],
    run: Path,
    losses: Callable[[Path], list[tuple[int, float]]],
    tmp_path: Path,
) -> None:
    """The job of docs/how-to/training-data.md."""
    lines = [{"prompt": "abc" * (n % 3 + 1), "completion": "d" * (n + 2)} for n in range(6)]
    (tmp_path / "pairs.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    job_data["data"] = {"files": "pairs.jsonl", "sequence_length": 40}
    config = {"model_type": "qwen3_next", **_SMALL, **_EXPERTS, **_LINEAR}
    job_data["model"] = {"config": config, "ops_implementation": _KERNELS, "dtype": "float32"}
    # Each step learns from all documents: in one padded batch, as a batch of packed sequences, or as packed sequences
    # whose gradients are accumulated.
    train(job_data, "train.batch_size=6", f"train.output_dir={run}-alone")
    packs = _packs(lines, 40)
    rows, steps = (packs, 1) if rows_together else (1, packs)
    changes = ("data.packing=true", f"train.batch_size={rows}", f"train.gradient_accumulation={steps}")
    train(job_data, *changes, f"train.output_dir={run}-packed")
    alone, packed = (losses(Path(f"{run}-{name}")) for name in ("alone", "packed"))
    assert len(alone) == 4 and [step for step, _ in packed] == [step for step, _ in alone]
    assert [loss for _, loss in packed] == pytest.approx([loss for _, loss in alone], rel=1e-5)


def _packs(lines: list[dict[str, str]], length: int) -> int:
    """How many sequences best fit makes of the lines' bytes, each ended by a token."""
    sizes = np.array([len(line["prompt"] + line["completion"]) + 1 for line in lines])
    return len(pack(sizes, length, seed=0))


def test_a_model_without_positions_is_refused() -> None:
    with pytest.raises(ConfigError, match="BloomForCausalLM takes no position_ids"):
        check_packing(_model("bloom", "eager"), batch_size=2)


def test_a_difference_in_the_second_sequence_of_a_batch_is_seen() -> None:
    """As transformers' own flash attention has it: it reads the boundaries of a batch of one."""
    model = _model("llama")
    attend = model.model.layers[1].self_attn
    forward = attend.forward

    def mixing(*args: Any, **kwargs: Any) -> Any:
        output, *others = forward(*args, **kwargs)
        return output + (output[1:].roll(7, 1) if len(output) > 1 else 0), *others

    attend.forward = mixing
    check_packing(model, batch_size=1)
    with pytest.raises(ConfigError, match=r"The output of model\.layers\.1\.self_attn \(LlamaAttention\)"):
        check_packing(model, batch_size=2)


@pytest.mark.thorough
def test_bound_models_are_asked_with_their_kernels_and_under_autocast() -> None:
    model = _model("qwen3_moe", **_EXPERTS)
    binding = bind(model, {"preset": "auto"}, autocast="bfloat16")
    before = binding.receipt.to_json()
    check_packing(model, batch_size=2, autocast="bfloat16")
    assert binding.receipt.to_json() == before  # every kernel is still in place


@pytest.mark.thorough
def test_a_packed_job_trains_and_one_that_can_not_is_refused_before_its_first_step(
    job_data: dict[str, Any], train: Callable[..., bool], run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job_data["data"]["packing"] = True
    job_data["model"]["ops_implementation"] = {"preset": "eager", "attn_implementation": "sdpa"}
    train(job_data)
    assert "2 sequences, " not in (printed := capsys.readouterr().out) and "% full" in printed
    hybrid = {"model_type": "lfm2", **_SMALL, "layer_types": ["conv", "full_attention"]}
    job_data["model"]["config"] = {key: value for key, value in hybrid.items() if key != "head_dim"}
    with pytest.raises(ConfigError, match=r"data\.packing: Lfm2ForCausalLM can't keep packed documents apart"):
        train(job_data, f"train.output_dir={run}-hybrid")
    assert not Path(f"{run}-hybrid").exists()


@pytest.mark.thorough
def test_a_model_that_divides_by_itself_is_refused_where_not_every_token_is_learned(
    job_data: dict[str, Any], train: Callable[..., bool], run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_itself(*args: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        return ForCausalLMLoss(*args, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "loss_function", property(lambda model: by_itself))
    train(job_data, "train.save_every=never")
    with pytest.raises(ConfigError, match="LlamaForCausalLM computes each micro-batch's mean loss by itself"):
        train(
            job_data,
            "data.packing=true",
            "model.ops_implementation={preset: eager}",
            "train.gradient_accumulation=2",  # of one micro-batch in a step the mean is right
            f"train.output_dir={run}-packed",
        )
    assert not Path(f"{run}-packed").exists()
