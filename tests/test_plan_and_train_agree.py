"""``veomni plan`` and ``veomni train`` read one job alike: both take it, or both refuse it with the same message."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from veomni_core.cli.app import build_app
from veomni_core.errors import VeOmniError
from whole_jobs import JOB, REMOVED, SIZES, changed

BAD = {
    "no model": (changed(model=REMOVED), "model: is missing"),
    "an empty model": (changed(model=None), "model: must be a mapping, got nothing"),
    "a list for a model": (changed(model=["llama"]), "model: must be a mapping, got ['llama'] (list)"),
    "no config": (changed(model__config=REMOVED), "model: needs config (a mapping with model_type"),
    "a number for a config": (changed(model__config=3), "model.config: must be text or a mapping, got 3 (integer)"),
    "no model type": (changed(model__config=SIZES), "model.config: model_type is missing"),
    "an unknown type": (
        changed(model__config__model_type="lama"),
        "'lama' is unknown. Did you mean 'llama'",
    ),
    "a type that speaks no language": (
        changed(model__config={"model_type": "vit"}),
        "no model of the type vit that writes text",
    ),
    "a misspelt size": (changed(model__config__hiden_size=8), "model.config.hiden_size: llama has no such key"),
    "a config that is not there": (changed(model__config="nowhere/config.json"), "there is no such model config"),
    "a folder without a config": (changed(model__config="empty"), "there is no config.json in this folder"),
    "one thing by two words": (changed(model__config_path="llama"), "model.config_path: is another word for model.con"),
    "an unknown key": (changed(model__confg="llama"), "model.confg: there is no such key. Did you mean 'config'?"),
    "a kernel beside the section for it": (
        changed(model__moe_implementation="eager"),
        "model.moe_implementation: there is no such key. A kernel is chosen under model.ops_implementation.",
    ),
    "an unknown dtype": (changed(model__dtype="fp8"), "model.dtype: must be 'float32', 'bfloat16' or 'float16'"),
    "a dtype that can't be trained in": (changed(model__dtype="float16"), "model.dtype: float16 holds nothing below"),
    "a word for a switch": (changed(model__trust_remote_code="yes"), "model.trust_remote_code: must be true or false"),
    "code that comes with it": (changed(model__config="remote"), "asks to run code that comes with the model"),
    "no kernels": (changed(model__ops_implementation=REMOVED), "model.ops_implementation is missing"),
    "a word for kernels": (changed(model__ops_implementation="auto"), "model.ops_implementation: must be a mapping"),
    "an unknown field": (changed(model__ops_implementation__rms="torch"), "ops_implementation.rms: no such field"),
    "an unknown preset": (changed(model__ops_implementation__preset="fast"), "preset: 'fast' is unknown"),
    "an unknown kernel": (
        changed(model__ops_implementation__rms_norm_implementation="trch"),
        "rms_norm_implementation: 'trch' is unknown. Did you mean 'torch'?",
    ),
    "a kernel for other hardware": (
        changed(model__ops_implementation__rms_norm_implementation="npu"),
        "rms_norm_implementation: npu can't run here",
    ),
    "a kernel without a site": (
        changed(model__ops_implementation__moe_implementation="grouped_mm"),
        "the model has no moe_experts site",
    ),
    "weights that are not there": (changed(model__weights="nowhere"), "nowhere: expected a folder with *.safetensors"),
    "a folder without weights": (changed(model__weights="empty"), "expected a folder with *.safetensors files"),
    "weights that don't say whose": (
        changed(model__config=REMOVED, model__weights="bare"),
        "bare holds weights and no config.json",
    ),
    "an unknown section": (changed(trian={}), "trian: there is no such key. Did you mean 'train'?"),
    "no data": (changed(data=REMOVED), "data: is missing"),
    "a word for a number": (changed(train__steps="sixty"), "train.steps: must be an integer, got 'sixty' (text)"),
    "two problems": (changed(train__steps=0, model__dtype="fp8"), "2 problems"),
    "sections that contradict each other": (
        changed(train__warmup=5),
        "train.warmup: 5 is as long as the training or longer, and train.steps gives 1",
    ),
    "autocast over weights of 16 bits": (
        changed(model__dtype="bfloat16", train__precision="bf16_mixed"),
        "model.dtype is bfloat16, but train.precision: bf16_mixed trains float32 weights",
    ),
    "sizes that contradict each other": (changed(train__fsdp_size=4, train__ep_size=3), "3 does not divide the 4"),
    "two ways to shard": (changed(train__fsdp_size=2, train__fsdp=True), "write train.fsdp: false"),
    "too few positions": (changed(data__sequence_length=128), "the model's max_position_embeddings is 64"),
    "too few embeddings": (
        changed(model__config__vocab_size=100),
        "model.config.vocab_size is 100, but data.to",
    ),
    "bytes for weights with a tokenizer": (
        changed(model__weights="spoken", data__tokenizer="bytes"),
        "comes with the tokenizer that its weights were trained with",
    ),
    "weights that speak an unknown language": (
        changed(model__config=REMOVED, model__weights="wide"),
        "wide has 1,000 embeddings and comes without a tokenizer",
    ),
    "no data to read": (changed(data__files=REMOVED), "data: needs files, or sources"),
    "columns that contradict each other": (
        changed(data__columns={"text": "a", "messages": "b"}),
        "data.columns: names text and messages",
    ),
    "a misspelt key of a source": (
        changed(data__files=REMOVED, data__sources=[{"fils": "text.txt"}]),
        "data.sources.0.fils: there is no such key. Did you mean 'files'?",
    ),
    "no such template": (
        changed(model__weights="spoken", data__chat_template="none.jinja"),
        "none.jinja can't be read as text",
    ),
    "no such tokenizer": (changed(data__tokenizer="nowhere/tokenizer.json"), "data.tokenizer: there is no file"),
}
GOOD = {
    "as it is": JOB,
    "another word for config": changed(model__config=REMOVED, model__config_path="llama"),
    "weights, by another word": changed(model__config=REMOVED, model__path="llama"),
    "a config of the working directory": changed(model__config="here/config.json"),
    "autocast": changed(train__precision="bf16_mixed"),
    "weights of 16 bits": changed(model__dtype=REMOVED, train__precision="bf16"),
    "a vocabulary from the tokenizer": changed(model__config__vocab_size=REMOVED),
    "weights with a tokenizer": changed(model__weights="spoken"),
    "several sources": changed(data__files=REMOVED, data__sources=[{"files": "text.txt"}, {"files": "text.txt"}]),
    "code that is trusted": changed(model__config="remote", model__trust_remote_code=True),
}


@pytest.fixture
def ask(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """What a verb says of a job: nothing where it takes it."""
    monkeypatch.chdir(folder)

    def run(verb: str, data: dict[str, Any], *options: str) -> str:
        data = deepcopy(data)
        if isinstance(data.get("train"), dict):
            data["train"]["output_dir"] = str(tmp_path / "run")
        path = folder / "beside" / "job.yaml"
        path.write_text(yaml.safe_dump(data), encoding="utf-8")
        result = CliRunner().invoke(build_app(), [verb, str(path), *options])
        assert isinstance(result.exception, (VeOmniError, type(None))), result.exception
        assert (result.exit_code == 0) == (result.exception is None)
        return str(result.exception or "")

    return run


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("job, message", BAD.values(), ids=BAD)
def test_both_refuse_a_bad_job_with_the_same_message(ask, job, message):
    refused = ask("plan", job)
    assert message in refused
    assert ask("train", job) == refused


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("job", GOOD.values(), ids=GOOD)
def test_both_take_a_good_job(ask, job):
    assert (ask("plan", job), ask("train", job)) == ("", "")


CHANGES = {
    "a kernel": ("model.ops_implementation.rms_norm_implementation=torch", ""),
    "another model": ("model={config: llama, dtype: float32, ops_implementation: {preset: auto}}", ""),
    "a list": ("data.files=[text.txt, text.txt]", ""),
    "a config of the working directory": ("model.config=here/config.json", ""),
    "no such key": ("train.lr=1", "--set train.lr: there is no such key. Did you mean 'train.learning_rate'?"),
    "no such section": ("trian.steps=1", "--set trian.steps: there is no such key. Did you mean 'train.steps'?"),
    "through a value": ("data.files.first=a.txt", "--set data.files.first: data.files holds a value, not a section"),
    "no value": ("train.steps", "--set train.steps: write it as path=value"),
    "no YAML": ("data.files=[a", "--set data.files, line 1"),
    "a wrong type": ("train.steps=many", "train.steps: must be an integer, got 'many' (text)"),
    "a dtype": ("model.dtype=fp8", "model.dtype: must be 'float32', 'bfloat16' or 'float16'"),
    "sections that contradict each other": (
        "train.warmup=5",
        "train.warmup: 5 is as long as the training or longer, and train.steps gives 1",
    ),
    "a kernel for other hardware": ("model.ops_implementation.rms_norm_implementation=npu", "npu can't run here"),
    "a device": ("train.device=gpu", "got 'gpu' (text). Did you mean 'cuda'?"),
}


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("change, message", CHANGES.values(), ids=CHANGES)
def test_both_take_and_refuse_the_same_changes(ask, change, message):
    refused = ask("plan", JOB, "--set", change)
    assert message in refused and bool(message) == bool(refused)
    assert ask("train", JOB, "--set", change) == refused


def test_a_change_to_a_job_of_a_model_alone(ask):
    alone = {"model": JOB["model"]}
    assert ask("plan", alone, "--set", "model.dtype=bfloat16") == ""
    assert "model.lr: there is no such key" in ask("plan", alone, "--set", "model.lr=1")
    steps = ("--set", "train.steps=1")
    assert "data: is missing" in ask("plan", alone, *steps) and ask("plan", alone, *steps) == ask(
        "train", alone, *steps
    )


def test_a_job_of_a_model_alone_is_planned(ask):
    assert ask("plan", {"model": JOB["model"]}) == ""
    assert "data: is missing" in ask("train", {"model": JOB["model"]})
