"""Jobs that train a LoRA adapter: with kernels, resumed, exported, merged; and those that are refused."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from veomni_core import Hardware
from veomni_core.cli.app import build_app
from veomni_core.errors import CheckpointError, ConfigError, HostError, VeOmniError
from veomni_trainer.job.load import apply_overrides, parse_job
from veomni_trainer.job.resuming import ChangedKey
from veomni_trainer.output.adapters import adapted_model
from veomni_trainer.output.base_weights import BASE, base_of, check_base, known_base
from veomni_trainer.output.export import export_checkpoint
from veomni_trainer.run import start
from veomni_trainer.run.check import check_job
from veomni_trainer.run.dry_run import dry_run
from veomni_trainer.setup import adapter

Train = Callable[..., bool]
Losses = Callable[[Path], list[tuple[int, float]]]
EXPERTS = {
    "target_modules": ["q_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}


@pytest.fixture
def experts_data(lora_data: dict[str, Any], pretrained: Path) -> dict[str, Any]:
    """A job that adapts experts, whose weights lie in one tensor."""
    lora_data["model"]["weights"] = str(pretrained / "moe")
    lora_data["lora"] |= EXPERTS
    return lora_data


def bound_ops(run: Path) -> set[str]:
    """The ops that run on kernels, by a receipt that reports no change of them."""
    receipt = json.loads((run / "receipt.json").read_text(encoding="utf-8"))
    assert not receipt["changed"]
    return {kernel["kernel"].split("/")[0] for kernel in receipt["kernels"]}


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("fixture", ["lora_data", "experts_data"])
def test_kernels_train_the_same_adapter_as_the_model_s_own_code(
    request: pytest.FixtureRequest, train: Train, losses: Losses, run: Path, fixture: str
) -> None:
    data = request.getfixturevalue(fixture)
    train(data)
    eager = dict(losses(run))
    train(data, "model.ops_implementation={preset: auto}", overwrite=True)
    experts = ["moe_experts"] if "target_parameters" in data["lora"] else []
    assert {"rms_norm", "cross_entropy_loss", *experts} <= bound_ops(run)
    assert dict(losses(run)) == pytest.approx(eager, rel=1e-5)


@pytest.mark.thorough
def test_loads_of_adapted_experts_are_measured(experts_data: dict[str, Any], train: Train, run: Path) -> None:
    train(experts_data, "train.expert_loads=true", "train.steps=1")
    rows = json.loads((run / "expert_rows.jsonl").read_text(encoding="utf-8"))["rows"]
    assert [len(layer) for layer in rows] == [4, 4]
    assert [sum(layer) for layer in rows] == [2 * 32 * 2] * 2  # sequences x tokens x experts of each


@pytest.mark.thorough
def test_gradient_checkpointing_changes_nothing(
    lora_data: dict[str, Any], train: Train, losses: Losses, run: Path
) -> None:
    train(lora_data)
    plain = losses(run)
    train(lora_data, "train.gradient_checkpointing=true", overwrite=True)
    assert losses(run) == plain


@pytest.mark.thorough
@pytest.mark.parametrize("lora", [{}, {"use_dora": True, "modules_to_save": ["lm_head"]}, EXPERTS], ids=str)
def test_a_resumed_run_goes_on_exactly(
    lora_data: dict[str, Any], pretrained: Path, train: Train, losses: Losses, run: Path, lora: dict[str, Any]
) -> None:
    lora_data["lora"] |= lora if lora == EXPERTS else {"dropout": 0.1} | lora
    if lora == EXPERTS:
        lora_data["model"]["weights"] = str(pretrained / "moe")
    # LoRA+: the second matrix learns faster
    lora_data["train"] |= {"parameter_groups": [{"match": "*lora_B*", "learning_rate": 0.05}], "save_every": 2}
    train(lora_data)
    whole = losses(run)
    assert {path.name for path in (run / "checkpoint-4").glob("*.safetensors")} == {"adapter_model.safetensors"}
    shutil.rmtree(run / "checkpoint-4")
    train(lora_data, resume=True)
    assert losses(run) == whole


@pytest.mark.thorough
def test_another_adapter_is_not_resumed(lora_data: dict[str, Any], train: Train, run: Path) -> None:
    train(lora_data)
    before = (run / "metrics.jsonl").read_text(encoding="utf-8")
    with pytest.raises(
        CheckpointError, match=r"was trained with another adapter: r 4 -> 8\. Restore the job's section"
    ):
        train(lora_data, "lora.rank=8", "train.steps=6", resume=True)
    with pytest.raises(CheckpointError, match="trained with another adapter: target_modules"):
        train(lora_data, "lora.target_modules=[q_proj]", "train.steps=6", resume=True)
    with pytest.raises(CheckpointError, match="another adapter: lora_alpha 8 -> 16"):
        dry_run(parse_job(apply_overrides(lora_data, ["lora.alpha=16", "train.steps=6"])), resume=True)
    with pytest.raises(ConfigError, match=r"lora\.quantization: not there -> nf4"):
        dry_run(parse_job(apply_overrides(lora_data, ["lora.quantization=nf4", "train.steps=6"])), resume=True)
    with pytest.raises(CheckpointError, match="holds a LoRA adapter; resume with the section lora"):
        train(lora_data, "lora=null", "train.steps=6", resume=True)
    (run / "checkpoint-4" / "adapter_model.safetensors").write_bytes(b"half")
    with pytest.raises(CheckpointError, match="damaged: adapter_model.safetensors has 4 bytes"):
        train(lora_data, "train.steps=6", resume=True)
    assert (run / "metrics.jsonl").read_text(encoding="utf-8") == before


def test_weights_that_are_read_again_must_be_those_of_the_start(
    lora_data: dict[str, Any], pretrained: Path, tmp_path: Path
) -> None:
    checkpoint, weights = tmp_path / "checkpoint", tmp_path / "weights"
    checkpoint.mkdir()
    shutil.copytree(pretrained / "llama", weights)
    start = parse_job(lora_data)
    moved = parse_job(apply_overrides(lora_data, [f"model.weights={weights}"]))
    whole = moved.model_copy(update={"lora": None})
    dpo = whole.model_copy(update={"train": whole.train.model_copy(update={"method": "dpo"})})
    another = ChangedKey("model.weights", "org/name@1", "org/name@2")
    check_base(checkpoint, moved, [another])  # an earlier version has not said what it started from
    (checkpoint / BASE).write_text(known_base(start, None) or "", encoding="utf-8")
    assert known_base(moved, checkpoint) == base_of(moved) == base_of(start) == known_base(dpo, None)
    assert known_base(whole, None) is None  # nothing reads them again
    check_base(checkpoint, moved, [])
    state = load_file(weights / "model.safetensors")
    state["model.norm.weight"][-1] += 1
    save_file(state, weights / "model.safetensors", {"format": "pt"})
    for job, why in ((moved, "the adapter was trained over them"), (dpo, "the reference model has them")):
        with pytest.raises(CheckpointError, match=rf"the files in .*weights were replaced.*{why}"):
            check_base(checkpoint, job, [])
    check_base(checkpoint, whole, [another])
    hub = moved.model_copy(update={"model": replace(moved.model, weights="org/name@2")})
    check_base(checkpoint, hub, [])
    with pytest.raises(CheckpointError, match="org/name@1 -> org/name@2: .* Restore them"):
        check_base(checkpoint, hub, [another])


@pytest.mark.thorough
def test_an_adapter_is_not_resumed_from_whole_weights(lora_data: dict[str, Any], train: Train) -> None:
    lora = lora_data.pop("lora")
    train(lora_data)
    lora_data["lora"] = lora
    with pytest.raises(CheckpointError, match="holds whole weights and no adapter"):
        train(lora_data, "train.steps=6", resume=True)


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("fixture", ["lora_data", "experts_data"])
def test_a_merged_run_is_a_plain_model_that_computes_the_same(
    request: pytest.FixtureRequest, train: Train, run: Path, tmp_path: Path, fixture: str
) -> None:
    data = request.getfixturevalue(fixture)
    train(data, "train.export=merged")
    base = AutoModelForCausalLM.from_pretrained(data["model"]["weights"])
    adapted = PeftModel.from_pretrained(base, run / "checkpoint-4").eval()
    merged = AutoModelForCausalLM.from_pretrained(run / "model").eval()
    ids = torch.arange(40, 60).view(2, 10)
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, adapted(ids).logits, rtol=1e-4, atol=1e-5)
    names = {name for name, _ in AutoModelForCausalLM.from_pretrained(data["model"]["weights"]).named_parameters()}
    assert {name for name, _ in merged.named_parameters()} == names
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    assert tokenizer.decode(merged.generate(ids[:1], max_new_tokens=2, do_sample=False)[0])


@pytest.mark.thorough
def test_an_export_is_the_adapter_unless_it_is_merged(lora_data: dict[str, Any], train: Train, run: Path) -> None:
    train(lora_data, "train.export=true")
    written = {path.name for path in (run / "model").iterdir()}
    assert written >= {"adapter_config.json", "adapter_model.safetensors"} and "model.safetensors" not in written
    train(lora_data, "train.export=true", overwrite=True)  # an exported adapter belongs to the run that is replaced
    result = CliRunner().invoke(build_app(), ["export", str(run), str(run / "merged"), "--merge"])
    assert result.stdout.startswith(f"{run / 'checkpoint-4'} -> {run / 'merged'}: ")
    assert (run / "merged" / "model.safetensors").exists() and (run / "merged" / "tokenizer.json").exists()
    shutil.rmtree(run / "merged")
    config = json.loads((run / "checkpoint-4" / "adapter_config.json").read_text(encoding="utf-8"))
    config["base_model_name_or_path"] = "nowhere"
    (run / "checkpoint-4" / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(CheckpointError, match="is an adapter over nowhere, and there is no such folder"):
        export_checkpoint(run / "checkpoint-4", run / "merged", merges_adapter=True)
    assert not (run / "merged").exists()


def test_an_adapter_that_can_not_be_merged_says_why(pretrained: Path, tmp_path: Path) -> None:
    config = {"peft_type": "LORA", "base_model_name_or_path": str(pretrained / "llama"), "target_modules": ["nowhere"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"can't be put over .*Target modules .*nowhere.* not found"):
        adapted_model(tmp_path, trust_remote_code=False)


@pytest.mark.thorough
def test_whole_weights_are_not_merged(job_data: dict[str, Any], train: Train, run: Path) -> None:
    train(job_data)
    with pytest.raises(ConfigError, match="holds whole weights and no adapter that could be merged; leave --merge out"):
        export_checkpoint(run / "checkpoint-4", run / "merged", merges_adapter=True)


REFUSED: dict[str, tuple[list[str], str]] = {
    "no weights": (
        ["model.weights=null", "model.config={model_type: llama}"],
        "lora trains an adapter over weights that stay as they are; name them as model.weights",
    ),
    "PEFT's name": (["lora.r=4"], "lora.r: there is no such key; write lora.rank"),
    "a misspelt module": (["lora.target_modules=[q_prj]"], "the model has no 'q_prj'. Did you mean 'q_proj'?"),
    "a misspelt parameter": (
        ["lora.target_parameters=[mlp.experts.down]"],
        "lora.target_parameters: the model has no 'mlp.experts.down'.",
    ),
    "one of several": (["lora.modules_to_save=[lm_head, hd]"], "lora.modules_to_save: the model has no 'hd'."),
    "no expression": (["lora.target_modules='*'"], "lora.target_modules: '*' is no regular expression: nothing to rep"),
    "no expression of none": (["lora.exclude_modules='('"], "lora.exclude_modules: '(' is no regular expression: "),
    "a rank above every width": (["lora.rank=1000000000"], "lora.rank: 1,000,000,000 is above 64, the model's largest"),
    "an expression of nothing": (["lora.target_modules=.*_prj"], "lora: Target modules"),
    "a glob of frozen parameters": (
        ["train.parameter_groups=[{match: model.norm.weight, weight_decay: 0}]"],
        "'model.norm.weight': no trained parameter has such a name",
    ),
    "shards": (["train.fsdp_size=2", "train.tp_size=2"], "lora is tested over models that are sharded by fsdp_size"),
    "an unknown start": (["lora.init_lora_weights=pissa"], "lora.init_lora_weights: must be"),
    "an unknown type": (["lora.quantization=int3"], "lora.quantization: must be 'nf4' or 'fp4', got 'int3'"),
    "frozen weights of another kind": (["model.dtype=float16"], "model.dtype: float16 holds nothing below"),
    "nothing to merge": (["lora=null", "train.export=merged"], "train.export: merged adds an adapter to its weights"),
}


@pytest.mark.parametrize("changes, message", REFUSED.values(), ids=REFUSED)
def test_plan_and_train_refuse_alike(
    lora_data: dict[str, Any],
    write_job: Callable[[dict[str, Any]], Path],
    train: Train,
    run: Path,
    changes: list[str],
    message: str,
) -> None:
    if changes[0] == "lora.r=4":
        lora_data["lora"]["r"], changes = 4, []
    with pytest.raises(VeOmniError) as planned:
        check_job(write_job(apply_overrides(lora_data, changes)), Hardware.cpu())
    assert message in str(planned.value)
    with pytest.raises(VeOmniError) as trained:
        train(apply_overrides(lora_data, changes))
    assert str(trained.value) == str(planned.value)
    assert not run.exists()


@pytest.mark.parametrize(
    "change, message",
    [
        ("lora.rank=4", "lora needs peft, which is not installed: pip install 'veomni-trainer[lora]'"),
        ("lora.quantization=nf4", "lora.quantization: nf4 needs bitsandbytes, which is not installed: pip install"),
    ],
)
def test_a_package_that_is_missing_is_named(
    lora_data: dict[str, Any],
    write_job: Callable[[dict[str, Any]], Path],
    train: Train,
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: str,
    message: str,
) -> None:
    missing = "bitsandbytes" if "quantization" in change else "peft"
    monkeypatch.setattr(adapter, "find_spec", lambda name: None if name == missing else object())
    with pytest.raises(HostError) as caught:
        train(lora_data, change)
    assert message in str(caught.value)
    assert not run.exists()
    with pytest.raises(HostError) as planned:
        check_job(write_job(apply_overrides(lora_data, [change])), Hardware.cpu())
    assert str(planned.value) == str(caught.value)


def prepared(data: dict[str, Any], train: Train, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The model that the job trains, before its first step."""
    models = []
    made = adapter.with_adapter
    monkeypatch.setattr(start, "with_adapter", lambda *args: models.append(made(*args)) or models[-1])
    train(data)
    return models[0]


@pytest.mark.thorough
def test_frozen_weights_may_have_16_bits_and_adapters_have_32(
    lora_data: dict[str, Any], train: Train, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lora_data["model"]["dtype"] = "bfloat16"
    lora_data["train"]["precision"] = "bf16_mixed"
    model = prepared(lora_data, train, monkeypatch)
    dtypes = {parameter.requires_grad: parameter.dtype for parameter in model.parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}
    assert all(("lora_" in name) == parameter.requires_grad for name, parameter in model.named_parameters())


@pytest.mark.thorough
def test_quantized_weights_are_trained_over_and_merged_whole(
    lora_data: dict[str, Any], train: Train, losses: Losses, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    lora_data["lora"]["quantization"] = "nf4"
    lora_data["model"]["ops_implementation"] = {"preset": "auto"}
    model = prepared(lora_data, train, monkeypatch)
    layer = model.base_model.model.model.layers[0]
    assert isinstance(layer.mlp.up_proj.base_layer, bitsandbytes.nn.Linear4bit)
    assert type(model.get_output_embeddings()).__name__ == "Linear"
    values = [loss for _, loss in losses(run)]
    assert all(map(math.isfinite, values)) and values[-1] < values[0]
    assert "rms_norm" in bound_ops(run)
    export_checkpoint(run / "checkpoint-4", run / "merged", merges_adapter=True)
    merged = AutoModelForCausalLM.from_pretrained(run / "merged")
    assert merged.dtype == torch.float32 and not getattr(merged, "is_quantized", False)


def test_quantized_weights_are_not_validated_on_a_cpu(lora_data: dict[str, Any], train: Train, run: Path) -> None:
    pytest.importorskip("bitsandbytes")
    lora_data["lora"]["quantization"] = "nf4"
    lora_data["data"]["validation_fraction"] = 0.1
    with pytest.raises(HostError, match="nf4 can't be validated on a CPU: bitsandbytes repacks the weights"):
        train(lora_data)
    assert not run.exists()
