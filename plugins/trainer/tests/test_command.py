"""The command as a user runs it: in processes of its own, interrupted, and compared."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from forked_eager import fork_veomni_and_eager, veomni_and_eager
from typer.testing import CliRunner

from forked_processes import Forked, finish, fork_veomni, run_veomni, veomni
from veomni_core.cli.app import build_app
from veomni_core.errors import CheckpointError, ConfigError
from veomni_trainer.loop.trainer import JobTrainer
from veomni_trainer.run import checkpoints

WriteJob = Callable[[dict[str, Any]], Path]
Losses = Callable[[Path], list[tuple[int, float]]]


def _interrupt_after(rows: int, metrics: Path, process: Forked) -> subprocess.CompletedProcess[str]:
    """Press Ctrl-C once ``metrics`` has so many rows."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.is_running():
        if metrics.exists() and len(metrics.read_text(encoding="utf-8").splitlines()) >= rows:
            break
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    return finish([process], timeout=60)[0]


# Says after each command what has been imported by then.
_IMPORTS = """
import os, sys
from contextlib import redirect_stdout

def show(*names):
    print(sorted(name for name in sys.modules if name in names or name.partition(".")[0] in names))

import veomni_trainer.plugin as plugin; plugin.veomni_commands(); import veomni_trainer.run.command
show("torch", "transformers", "pydantic", "matplotlib", "numpy", "jinja2")
from veomni_core.cli.app import build_app
with redirect_stdout(sys.stderr):
    build_app()(["plan", sys.argv[1], "--hardware", "h200"], standalone_mode=False)
show("transformers.trainer", "peft", "bitsandbytes", "datasets")
with redirect_stdout(sys.stderr):
    build_app()(["train", sys.argv[1]], standalone_mode=False)
show("bitsandbytes", "trl")
os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what the library itself prints is no command's
import bitsandbytes.nn
print(bitsandbytes.nn is sys.modules["bitsandbytes.nn"], bitsandbytes.__version__)
"""


@pytest.mark.thorough
def test_a_command_imports_only_what_its_job_needs(job_data: dict[str, Any], write_job: WriteJob) -> None:
    job_data["train"] |= {"steps": 1, "save_every": "never"}
    command = [sys.executable, "-c", _IMPORTS, str(write_job(job_data))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    # Of bitsandbytes only the place is kept, for PEFT, which transformers' Trainer imports: none of its code has run.
    described, planned, trained, loaded = done.stdout.splitlines()
    assert (described, planned, trained) == ("[]", "['bitsandbytes']", "['bitsandbytes']")
    assert loaded == f"True {version('bitsandbytes')}"  # asked for, it is the library
    assert "step 1/1" in done.stderr and "kernels-community" not in done.stderr and "Warning" not in done.stderr


def test_the_verb_is_there_and_explains_itself() -> None:
    command = [sys.executable, "-m", "veomni_core.cli", "train", "--help"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    for option in ("--set", "--compare", "--resume", "--overwrite", "--accept-plan-change", "--json"):
        assert option in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--compare", "eagre"], "error: --compare eagre: nothing to compare with. Did you mean 'eager'?"),
        (["--resume", "--overwrite"], "error: --resume continues a run and --overwrite replaces it; give one of the"),
        (["--set", "train.stps=3"], "error: --set train.stps: there is no such key. Did you mean 'train.steps'?"),
    ],
)
def test_bad_usage_is_one_clean_message(
    job_data: dict[str, Any], write_job: WriteJob, arguments: list[str], message: str
) -> None:
    result = veomni("train", write_job(job_data), *arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(message)
    assert "Traceback" not in result.stderr


@pytest.mark.thorough
def test_a_compared_run_lies_on_the_eager_one(
    job_data: dict[str, Any], qwen3_moe: dict[str, Any], write_job: WriteJob, losses: Losses, tmp_path: Path
) -> None:
    job_data["model"]["config"] = qwen3_moe
    job_data["model"]["ops_implementation"] = {"preset": "auto"}
    job = write_job(job_data)
    result = veomni("train", job, "--compare", "eager")
    assert result.returncode == 0, result.stderr
    run = tmp_path / "run"
    for (step, loss), (eager_step, eager_loss) in zip(losses(run), losses(run / "eager"), strict=True):
        assert step == eager_step
        assert loss == pytest.approx(eager_loss, rel=1e-4)
    comparison = json.loads((run / "summary.json").read_text(encoding="utf-8"))["comparison"]
    assert comparison["steps"] == 4
    assert comparison["largest_loss_difference"] < 1e-3
    assert "Against eager: largest loss difference" in result.stdout
    assert "Side by side" in (run / "report.html").read_text(encoding="utf-8")
    receipt = json.loads((run / "eager" / "receipt.json").read_text(encoding="utf-8"))
    assert {op["asked"] for op in receipt["ops"]} == {"eager"}


@pytest.mark.thorough
def test_json_is_all_of_standard_output(job_data: dict[str, Any], write_job: WriteJob, tmp_path: Path) -> None:
    job_data["train"] |= {"steps": 2, "export": True}
    result = veomni("train", write_job(job_data), "--json", "--compare", "eager")
    assert result.returncode == 0, result.stderr
    answer, run = json.loads(result.stdout), tmp_path / "run"
    assert answer == {
        **json.loads((run / "summary.json").read_text(encoding="utf-8")),
        "interrupted": False,
        "paths": {
            "output_dir": str(run),
            **{name: str(run / f"{name}.json") for name in ("plan", "receipt", "summary")},
            "job": str(run / "job.yaml"),
            "metrics": str(run / "metrics.jsonl"),
            "report": str(run / "report.html"),
            "checkpoint": str(run / "checkpoint-2"),
            "weights": str(run / "model"),
            "eager": str(run / "eager"),
        },
    }
    for said in ("Bound on cpu", "step 2/2", "The same job, all-eager", "Against eager:", "report: "):
        assert said in result.stderr


def test_a_dry_run_is_told_as_json_too(job_data: dict[str, Any], write_job: WriteJob) -> None:
    result = CliRunner().invoke(build_app(), ["train", str(write_job(job_data)), "--dry-run", "--json"])
    answer = json.loads(result.stdout)
    assert (answer["steps"], answer["tokens_per_step"], answer["resumes"]) == (4, 64, None)


@pytest.mark.thorough
def test_json_says_what_is_not_there(
    job_data: dict[str, Any], write_job: WriteJob, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job_data["train"] |= {"steps": 1, "save_every": "never"}
    result = CliRunner().invoke(build_app(), ["train", str(write_job(job_data)), "--json"])
    answer = json.loads(result.stdout)
    assert [name for name, path in answer["paths"].items() if path is None] == ["checkpoint", "weights", "eager"]
    monkeypatch.setenv("RANK", "1")
    other = CliRunner().invoke(build_app(), ["train", str(write_job(job_data)), "--json", "--overwrite"])
    assert (other.exit_code, other.stdout) == (0, "")


def test_an_eager_run_that_fails_leaves_the_job_s_own_results(
    job_data: dict[str, Any], write_job: WriteJob, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "eager").touch()
    result = veomni_and_eager("train", write_job(job_data), "--compare", "eager")
    assert result.returncode == 1
    assert "the eager run ended with exit code" in result.stderr
    assert (tmp_path / "run" / "report.html").exists()


@pytest.mark.thorough
def test_ctrl_c_leaves_a_checkpoint_that_resumes_to_the_same_curve(
    job_data: dict[str, Any], qwen3_moe: dict[str, Any], write_job: WriteJob, losses: Losses, tmp_path: Path
) -> None:
    job_data["model"]["config"] = {**qwen3_moe, "attention_dropout": 0.1}
    job_data["train"] |= {"steps": 60, "gradient_accumulation": 2, "save_every": "never", "warmup": 5}
    job = write_job(job_data)
    whole, halved = tmp_path / "whole", tmp_path / "halved"
    assert veomni("train", job, "--set", f"train.output_dir={whole}").returncode == 0
    assert not [*whole.glob("checkpoint-*")]

    stopped = _interrupt_after(
        4, halved / "metrics.jsonl", fork_veomni("train", job, "--set", f"train.output_dir={halved}")
    )
    assert stopped.returncode == 130, stopped.stderr
    assert "Interrupted. Continue with the same command and --resume." in stopped.stdout
    assert "Traceback" not in stopped.stderr
    (checkpoint,) = halved.glob("checkpoint-*")
    assert 4 <= len(losses(halved)) < 60
    assert f"checkpoint-{len(losses(halved))}" == checkpoint.name
    assert (halved / "report.html").exists()

    resumed = veomni("train", job, "--set", f"train.output_dir={halved}", "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert losses(halved) == losses(whole)


def train_slowly(run: str, job: str, during: str) -> None:
    """``veomni train``, whose first step or checkpoint after the second checkpoint takes a minute."""
    place: Any = (JobTrainer, "start_step") if during == "a step" else (checkpoints, "write_manifest")
    original = getattr(*place)

    def slow(*given: Any) -> None:
        if Path(run, "checkpoint-2").is_dir():
            Path(run, "begun").touch()
            time.sleep(60)
        original(*given)

    setattr(*place, slow)
    run_veomni("train", job)


@pytest.mark.thorough
@pytest.mark.parametrize("during", ["a step", "a checkpoint"])
def test_a_second_ctrl_c_stops_at_once_and_loses_nothing_that_was_saved(
    job_data: dict[str, Any], write_job: WriteJob, losses: Losses, run: Path, during: str
) -> None:
    """Both come in one step, or while the files of a checkpoint are written."""
    job_data["train"] |= {"steps": 8, "save_every": 2}
    job = write_job(job_data)
    process = Forked(train_slowly, str(run), str(job), during, environment=dict(os.environ))
    deadline = time.monotonic() + 60
    while not (run / "begun").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    assert process.is_running()
    process.send_signal(signal.SIGINT)
    stopped = finish([process], timeout=20)[0]
    assert stopped.returncode == 130, stopped.stderr
    assert "ends after this step, with a checkpoint. Again: stops at once, without one" in stopped.stderr
    assert "Stopped at once. Go on from checkpoint-2 with --resume." in stopped.stdout
    assert "Traceback" not in stopped.stderr
    assert [each.name for each in run.glob("*checkpoint-*")] == ["checkpoint-2"]
    resumed = veomni("train", job, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert [step for step, _ in losses(run)] == [*range(1, 9)]


@pytest.mark.thorough
def test_ctrl_c_stops_the_eager_run_too_and_both_are_resumed(
    job_data: dict[str, Any], write_job: WriteJob, losses: Losses, tmp_path: Path
) -> None:
    job_data["train"] |= {"steps": 30, "save_every": 10}
    job, run = write_job(job_data), tmp_path / "run"
    command = ("train", job, "--compare", "eager")
    stopped = _interrupt_after(3, run / "eager" / "metrics.jsonl", fork_veomni_and_eager(*command))
    assert stopped.returncode == 130, stopped.stderr
    assert "Traceback" not in stopped.stderr
    assert 3 <= len(losses(run)) == len(losses(run / "eager")) < 30
    resumed = veomni_and_eager(*command, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert [step for step, _ in losses(run)] == list(range(1, 31))
    assert [step for step, _ in losses(run / "eager")] == list(range(1, 31))


def test_export_writes_a_runs_last_weights(
    moe_data: dict[str, Any], train: Callable[..., bool], run: Path, tmp_path: Path
) -> None:
    train(moe_data, "train.steps=2", "train.warmup=1", "train.save_every=1", "train.export=true")
    result = CliRunner().invoke(build_app(), ["export", str(run), str(tmp_path / "out")])
    start = f"{run / 'checkpoint-2'} -> {tmp_path / 'out'}: it ends at 256; the same logits as the trained model's, to "
    assert result.exit_code == 0 and result.stdout.startswith(start)
    weights = "model.safetensors"
    assert (tmp_path / "out" / weights).read_bytes() == (run / "checkpoint-2" / weights).read_bytes()
    for name in (weights, "config.json", "generation_config.json"):
        assert (run / "model" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
    again = CliRunner().invoke(build_app(), ["export", str(run / "checkpoint-1"), str(tmp_path / "out")])
    assert isinstance(again.exception, ConfigError) and "exists; name a folder that doesn't" in str(again.exception)
    empty = CliRunner().invoke(build_app(), ["export", str(tmp_path / "text"), str(tmp_path / "new")])
    assert isinstance(empty.exception, CheckpointError) and "no weights that can be exported" in str(empty.exception)
    assert not (tmp_path / "new").exists()
