"""What stands before a training: a new job's YAML, its schema for editors, and the dry run."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner

from veomni_core.cli.app import build_app
from veomni_core.errors import CheckpointError, ConfigError, HostError, JobFileError, UnknownNameError, VeOmniError
from veomni_trainer.job.json_schema import job_schema
from veomni_trainer.job.load import load_job
from veomni_trainer.job.new_job import new_job
from veomni_trainer.output.folder import locked
from veomni_trainer.run.dry_run import dry_run

WriteJob = Callable[[dict[str, Any]], Path]
EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.yaml"))


def _run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(build_app(), [str(each) for each in arguments], catch_exceptions=True)


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    found = job_schema()
    jsonschema.Draft202012Validator.check_schema(found)
    return found


def test_a_dry_run_says_what_the_job_would_do(job_data: dict[str, Any], write_job: WriteJob, run: Path) -> None:
    job_data["train"] |= {"steps": 21, "gradient_accumulation": 2}
    found = dry_run(load_job(write_job(job_data)))
    sequences = len(found.corpus.training)
    assert found.tokens_per_step == 2 * 2 * 32
    assert found.epochs == pytest.approx(21 * 4 / sequences)
    assert found.parameters > 0 and found.memory is not None
    text = found.describe()
    for part in (
        "data: 2 files",
        "21 steps of 128 tokens",
        "starts from step 0",
        "weights",
        "rms_norm_implementation",
        "Nothing was",
    ):
        assert part in text
    assert json.loads(json.dumps(found.to_dict()))["memory"]["total"] == found.memory.total
    assert not run.exists()


@pytest.mark.thorough
def test_a_dry_run_of_a_resumed_job_starts_at_its_checkpoint(
    job_data: dict[str, Any], write_job: WriteJob, train: Callable[..., bool], run: Path
) -> None:
    train(job_data)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    found = dry_run(load_job(write_job(job_data), ["train.steps=9"]), resume=True)
    assert f"resuming from {run / 'checkpoint-4'}\nchanged since: train.steps: 4 -> 9" in found.describe()
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    with pytest.raises(ConfigError, match="holds an earlier run"):
        dry_run(load_job(write_job(job_data)))


def test_a_dry_run_refuses_what_training_refuses(job_data: dict[str, Any], write_job: WriteJob) -> None:
    cases: list[tuple[dict[str, Any], type[VeOmniError], str]] = [
        ({"train": {"batch_size": 5000}}, JobFileError, "one step takes 5,000"),
        ({"data": {"files": "text/aa.txt"}}, JobFileError, r"no file or folder .*/aa\.txt\. Did you mean 'a\.txt'\?"),
        ({"model": {"ops_implementation": {"rms_norm_implementation": "tritn"}}}, UnknownNameError, "tritn"),
        ({"model": {"weights": "nowhere"}}, VeOmniError, "nowhere"),
    ]
    for change, error, message in cases:
        data = copy.deepcopy(job_data)
        for section, keys in change.items():
            data[section] |= keys
        with pytest.raises(error, match=message):
            dry_run(load_job(write_job(data)))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_hidden_layers": 3}, r"missing keys: model\.layers\.2\.input_layernorm\.weight, .* and 4 more"),
        ({"num_hidden_layers": 1}, r"unexpected keys: model\.layers\.1\."),
        ({"attention_bias": True}, r"missing keys: model\.layers\.0\.self_attn\.k_proj\.bias"),
        ({"intermediate_size": 56}, "mismatched keys: "),
    ],
)
def test_weights_of_another_config_are_refused_alike(
    job_data: dict[str, Any],
    write_job: WriteJob,
    train: Callable[..., bool],
    pretrained: Path,
    tmp_path: Path,
    change: dict[str, Any],
    says: str,
) -> None:
    folder = shutil.copytree(pretrained / "llama", tmp_path / "weights")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | change), encoding="utf-8")
    job_data["model"] = {"weights": str(folder), "ops_implementation": {"preset": "eager"}}
    with pytest.raises(CheckpointError, match=says) as looked:
        dry_run(load_job(write_job(job_data)))
    with pytest.raises(CheckpointError) as trained:
        train(job_data)
    assert str(looked.value) == str(trained.value)


def test_a_folder_that_can_not_be_written_is_refused_by_a_dry_run(
    job_data: dict[str, Any], write_job: WriteJob, run: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere" / "at all")
    for path, says in {
        "file": "is a file; name a folder",
        "file/run": "leads through the file",
        "link": "can't be written: ",
        "/proc/veomni/run": "can't be written: ",
    }.items():
        job_data["train"]["output_dir"] = str(tmp_path / path)
        with pytest.raises(VeOmniError, match=f"train.output_dir: .*{says}"):
            dry_run(load_job(write_job(job_data)), overwrite=True)
    job_data["train"]["output_dir"] = str(run)
    with locked(run), pytest.raises(HostError, match="another job is writing to"):
        dry_run(load_job(write_job(job_data)))
    assert not run.exists()


@pytest.mark.thorough
def test_a_dry_run_of_a_sharded_job_starts_no_process(moe_data: dict[str, Any], write_job: WriteJob) -> None:
    moe_data["train"] |= {"fsdp_size": 2, "ep_size": 2, "steps": 2, "warmup": 0}
    found = dry_run(load_job(write_job(moe_data)))
    assert found.processes == 2
    assert found.tokens_per_step == 2 * 2 * 2 * 32
    assert "token_dispatch" in found.describe()


def test_a_dry_run_is_not_for_torchrun(
    job_data: dict[str, Any], write_job: WriteJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="without torchrun"):
        dry_run(load_job(write_job(job_data)))


def test_more_memory_than_there_is_comes_with_advice(
    job_data: dict[str, Any], write_job: WriteJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("veomni_trainer.run.dry_run._memory_of", lambda device: 1000)
    assert (
        "That is more than cpu has (0.0 MB). Lower train.batch_size"
        in dry_run(load_job(write_job(job_data))).describe()
    )


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize(
    "model", ["llama", "qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "gemma3_text", "glm4_moe"]
)
def test_init_writes_a_job_that_can_train(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = _run(
        "init", "new.yaml", "--model", model, "--data", "python-stdlib", "--steps", "7", "--sequence-length", "64"
    )
    assert result.exit_code == 0, result.output + str(result.exception)
    job = load_job(tmp_path / "new.yaml")
    assert (job.train.steps, job.data.sequence_length, job.train.output_dir) == (7, 64, str(tmp_path / "runs/new"))
    assert isinstance(job.model.config, dict) and job.model.config["model_type"] == model


@pytest.mark.thorough
def test_init_takes_weights_where_there_are_some(
    job_data: dict[str, Any], train: Callable[..., bool], run: Path, tmp_path: Path
) -> None:
    train(job_data)
    written = tmp_path / "next.yaml"
    arguments = ("--model", run / "checkpoint-4", "--data", tmp_path / "text", "--sequence-length", "32")
    assert _run("init", written, *arguments, "--steps", "2").exit_code == 0
    assert load_job(written).model.weights == str(run / "checkpoint-4")


def test_init_takes_a_hub_id_for_weights() -> None:
    written = yaml.safe_load(new_job("new.yaml", "org/tiny", "org/rows", "runs/new", 2, 32, "auto"))
    assert written["model"]["weights"] == "org/tiny" and "config" not in written["model"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "qwen3_mo", "--data", "x"), "Did you mean 'qwen3_moe'?"),
        (("--data", "x"), "--model is missing, and there is no terminal"),
        (("--model", "llama"), "--data is missing, and there is no terminal"),
        (("--model", "llama", "--data", "x", "--sequence-length", "1"), "data.sequence_length"),
        (("--model", "llama", "--data", "x", "--preset", "atuo"), "Did you mean 'auto'?"),
    ],
)
def test_init_writes_nothing_that_would_be_refused(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    result = _run("init", tmp_path / "new.yaml", *arguments)
    assert isinstance(result.exception, VeOmniError) and message in str(result.exception)
    assert not (tmp_path / "new.yaml").exists()


def test_init_keeps_what_is_there(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("mine", encoding="utf-8")
    assert "exists" in str(_run("init", job, "--model", "llama", "--data", "x").exception)
    assert job.read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_fits_the_schema(path: Path, schema: dict[str, Any]) -> None:
    jsonschema.validate(yaml.safe_load(path.read_text(encoding="utf-8")), schema)


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize(
    "change",
    [
        {"train": {"stps": 3}},
        {"train": {"steps": 0}},
        {"train": {"steps": "two"}},
        {"data": {"sequence_length": None}},
        {"model": {"dtype": "fp8"}},
        {"model": {"ops_implementation": {"rms_norm_implementation": "tritn"}}},
        {"model": {"ops_implementation": {"rms_nrm_implementation": "torch"}}},
    ],
    ids=str,
)
def test_the_schema_refuses_what_the_reader_refuses(
    change: dict[str, dict[str, Any]], job_data: dict[str, Any], write_job: WriteJob, schema: dict[str, Any]
) -> None:
    jsonschema.validate(job_data, schema)
    for section, keys in change.items():
        job_data[section] |= keys
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(job_data, schema)


def test_every_key_of_the_schema_says_what_it_is(schema: dict[str, Any]) -> None:
    for name in ("ModelSection", "DataSection", "TrainSection"):
        silent = [key for key, value in schema["$defs"][name]["properties"].items() if not value.get("description")]
        assert not silent, f"{name}: {silent}"


def test_the_schema_is_printed_as_json() -> None:
    assert json.loads(_run("schema").stdout)["title"] == "A job of `veomni train`"
