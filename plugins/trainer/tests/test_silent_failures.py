"""What would train something else than was meant ends before it does, or is trained as it should be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from veomni_core import bind
from veomni_core.errors import CheckpointError, ConfigError, HostError, JobFileError, PluginError
from veomni_trainer.job.load import load_job
from veomni_trainer.run.raising_kernels import naming_kernels
from veomni_trainer.run.run_job import naming_lack_of_memory
from veomni_trainer.run.training import InterruptCallback
from veomni_trainer.setup.method_models import check_causal
from veomni_trainer.setup.trl_arguments import load_reward
from veomni_transformers.build import build_skeleton

Train = Callable[..., bool]
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 320,
}
T5 = {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 1, "num_heads": 2, "vocab_size": 320}


# Models that are trained on next tokens


@pytest.mark.parametrize(
    ("kind", "architecture", "says"),
    [
        ("bert", "BertForMaskedLM", "its loss is not that of the next token"),
        ("bert", "BertLMHeadModel", "sees the tokens that come after a position"),
        ("bert", "BertForTokenClassification", "no output projection to words"),
        ("llama", "LlamaForSequenceClassification", "no output projection to words"),
        ("llama", "LlamaModel", r"architectures: \[LlamaForCausalLM\]"),
        ("t5", "T5ForConditionalGeneration", "by an encoder"),
    ],
)
def test_a_model_that_learns_no_next_token_is_refused(kind: str, architecture: str, says: str) -> None:
    config = AutoConfig.for_model(kind, **(T5 if kind == "t5" else SMALL), architectures=[architecture])
    with pytest.raises(ConfigError, match=says):
        check_causal(build_skeleton(config))


@pytest.mark.parametrize(
    ("kind", "setting", "remedy"),
    [
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention: false"),
        ("llama", {"is_causal": False}, "is_causal: true"),
    ],
)
def test_a_decoder_that_sees_both_ways_is_refused(kind: str, setting: dict[str, bool], remedy: str) -> None:
    config = AutoConfig.for_model(kind, **SMALL, **setting, num_key_value_heads=2, head_dim=16)
    with pytest.raises(ConfigError, match=f"sees the tokens that come after a position.*{remedy}"):
        check_causal(build_skeleton(config))


@pytest.mark.parametrize("kind", ["llama", pytest.param("gpt2", marks=pytest.mark.thorough)])
def test_causal_models_are_none_of_them(kind: str) -> None:
    check_causal(build_skeleton(AutoConfig.for_model(kind, **(SMALL if kind == "llama" else {"n_layer": 1}))))
    decoder = AutoConfig.for_model("bert", **SMALL, architectures=["BertLMHeadModel"], is_decoder=True)
    check_causal(build_skeleton(decoder))


def test_weights_that_are_not_finite_are_named_before_a_step(
    lora_data: dict[str, Any], pretrained: Path, tmp_path: Path, train: Train, run: Path
) -> None:
    del lora_data["lora"]
    weights = tmp_path / "weights"
    AutoModelForCausalLM.from_pretrained(pretrained / "llama").save_pretrained(weights)
    tensors = load_file(weights / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, weights / "model.safetensors", {"format": "pt"})
    lora_data["model"]["weights"] = str(weights)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight holds values that are not finite"):
        train(lora_data)
    assert not run.exists()


# Steps


@pytest.mark.parametrize("method", ["pretrain", pytest.param("sft", marks=pytest.mark.thorough)])
def test_the_routers_loss_counts_once_however_gradients_accumulate(
    job_data: dict[str, Any], pretrained: Path, tmp_path: Path, train: Train, run: Path, method: str
) -> None:
    text = "the quick brown fox jumps over t" * 8  # equal sequences, whose routers' losses are equal too
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    (tmp_path / "text").rename(tmp_path / "unused")
    job_data["model"] = {
        "weights": str(pretrained / "moe"),
        "ops_implementation": {"preset": "auto"},
    }
    job_data["data"] = {"files": "text.txt", "sequence_length": 32, "tokenizer": str(pretrained / "moe")}
    job_data["train"] |= {"steps": 1, "max_grad_norm": False, "save_every": "never", "method": method}
    found = []
    for size, accumulation in ((4, 1), (1, 4)):
        changes = (f"train.batch_size={size}", f"train.gradient_accumulation={accumulation}")
        train(job_data, *changes, overwrite=True)
        row = json.loads((run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[0])
        found.append((row["loss"], row["grad_norm"]))
    assert found[1] == pytest.approx(found[0], rel=1e-4)


def test_norms_are_known_by_what_they_compute(job_data: dict[str, Any], train: Train, run: Path) -> None:
    norms = {"model_type": "hyperclovax", "use_post_norm": True, "num_key_value_heads": 1}
    job_data["model"]["config"] = SMALL | norms
    job_data["train"] |= {"weight_decay": 100.0, "schedule": "constant", "warmup": 0}
    train(job_data)
    weights = load_file(run / "checkpoint-4" / "model.safetensors")
    decayed = [name for name, each in weights.items() if "norm" in name and each.mean() < 0.9]  # by decay 0.9 ** 4
    assert not decayed and weights["model.layers.0.mlp.up_proj.weight"].std() < 0.9 * 0.02


# Checkpoints, and what ends a run


def test_a_flipped_byte_is_named(job_data: dict[str, Any], train: Train, run: Path) -> None:
    train(job_data)
    path = run / "checkpoint-4" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"damaged: model\.safetensors has other bytes than were written"):
        train(job_data, "train.steps=6", resume=True)


def test_a_second_signal_stops_at_once(
    job_data: dict[str, Any],
    train: Train,
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    original = InterruptCallback.on_step_end

    def twice(self: InterruptCallback, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step == 3:
            self.receive(2, None)
            self.receive(2, None)
        original(self, args, state, control, **more)

    monkeypatch.setattr(InterruptCallback, "on_step_end", twice)
    assert train(job_data, "train.save_every=2")
    assert "Stopped at once. Go on from checkpoint-2 with --resume." in capsys.readouterr().out
    assert json.loads((run / "summary.json").read_text(encoding="utf-8"))["ending"]["state"] == "interrupted"


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")]
)
def test_too_little_memory_of_a_cpu_is_named(error: Exception) -> None:
    with pytest.raises(HostError, match=r"out of memory: .*\. Lower train\.batch_size"), naming_lack_of_memory(False):
        raise error
    with pytest.raises(RuntimeError, match="another"), naming_lack_of_memory(False):
        raise RuntimeError("another")


def test_a_kernel_that_raises_is_named_with_its_site(plant: Callable[[], None]) -> None:
    plant()
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SMALL))
    binding, ids = bind(model, {"preset": "eager", "rms_norm_implementation": "without_eps"}), torch.ones(1, 3).long()
    said = (
        r"^rms_norm/standard:without_eps of acme-planted 1.0 raised at model.layers.0.input_layernorm: TypeError: .* "
        "veomni verify acme-planted --kernel rms_norm/standard:without_eps"
    )
    with pytest.raises(PluginError, match=said) as caught, naming_kernels():
        model(ids)
    assert isinstance(caught.value.__cause__, TypeError)
    binding.undo()
    bind(model, {"preset": "eager", "rms_norm_implementation": "torch"})
    model.model.layers[0].mlp.down_proj = torch.nn.Linear(3, 3)
    with pytest.raises(RuntimeError, match="shapes"), naming_kernels():
        model(ids)


def test_a_reward_that_raises_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("def judge(completions, **_):\n    return [1 / 0]\n", encoding="utf-8")
    with pytest.raises(
        JobFileError, match=r"reward\.py:judge raised ZeroDivisionError: .*line 2 of .*the first.*'a b'"
    ):
        load_reward(f"{tmp_path / 'reward.py'}:judge")(prompts=["a"], completions=["a b"])


def test_variables_in_paths_are_replaced_or_named(
    job_data: dict[str, Any], write_job: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CORPUS", str(tmp_path / "text"))
    job_data["data"]["files"] = "$CORPUS/a.txt"
    job_data["train"]["output_dir"] = "${CORPUS}/run"
    job = load_job(write_job(job_data))
    assert job.data.files == str(tmp_path / "text" / "a.txt")
    assert job.train.output_dir == str(tmp_path / "text" / "run")
    for key in ("train.output_dir", "data.cache", "data.files", "data.tokenizer", "model.weights", "model.config"):
        for name, missing in (("$NOWHERE/run", r"\$NOWHERE"), ("~nobody-here/run", "~nobody-here")):
            with pytest.raises(JobFileError, match=f"run names {missing}, and there is no such variable"):
                load_job(write_job(job_data), [f"{key}={name}"])


def test_an_added_row_is_trained_by_a_resized_model() -> None:
    from veomni_core import build_foundation_model

    torch.manual_seed(0)
    with pytest.raises(ConfigError, match="resize_embeddings needs whole weights"):
        build_foundation_model(
            {"model_type": "llama", **SMALL},
            ops_implementation={"preset": "eager"},
            init_device="meta",
            device="cpu",
            resize_embeddings=True,
            distributed_config={"fsdp_size": 2},
        )
