"""The mistakes of ``mistakes.yaml``: each ends in a typed error that says what to do, and changes no file."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from trained_runs import TrainedRun
from typer.testing import CliRunner

from forked_processes import veomni
from veomni_core import errors
from veomni_core.cli import exit_code
from veomni_core.cli.app import build_app

MISTAKES = yaml.safe_load(Path(__file__).with_name("mistakes.yaml").read_text(encoding="utf-8"))
IMAGE = bytes(range(256))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    """The folder that the head of ``mistakes.yaml`` describes."""
    torch.set_num_threads(1)
    trained = TrainedRun.train(tmp_path_factory.mktemp("world"))
    shutil.copytree(trained.checkpoint(6), trained.root / "weights")
    for folder in ("empty", "images"):
        (trained.root / folder).mkdir()
    for file in ("image.bin", "images/image.bin"):
        (trained.root / file).write_bytes(IMAGE)
    (trained.root / "empty.txt").touch()
    (trained.root / "tokenizer.json").write_text("{}", encoding="utf-8")
    return trained


@pytest.fixture
def here(world: TrainedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainedRun:
    """A copy of it as the working directory, with a job that writes to ``new``."""
    copy = world.copied(tmp_path / "here")
    job = yaml.safe_load(copy.job.read_text(encoding="utf-8"))
    job["train"] |= {"output_dir": "new"}
    copy.job.write_text(yaml.safe_dump(job), encoding="utf-8")
    monkeypatch.chdir(copy.root)
    return copy


def _prepare(here: TrainedRun, mistake: dict[str, Any]) -> list[str]:
    """Do what is ``on_disk``, and return the command's arguments."""
    for step in mistake.get("on_disk", ()):
        verb, name = step.split()
        path = here.root / name
        if verb == "remove":
            path.unlink()
        else:
            path.write_bytes(b"" if verb == "empty" else path.read_bytes()[: path.stat().st_size // 2])
    if "job" in mistake:
        here.job.write_text(mistake["job"], encoding="utf-8")
    changes = [part for change in mistake.get("set", ()) for part in ("--set", change)]
    return ["train", mistake.get("job_file", "job.yaml"), *changes, *mistake.get("arguments", ())]


def _marked(number: int, mistake: dict[str, Any]) -> Any:
    """Of the mistakes that end with one class of error, the first is among those of ``make test``."""
    is_first = mistake["error"] not in {each["error"] for each in MISTAKES[:number]}
    return pytest.param(mistake, marks=[] if is_first else [pytest.mark.thorough], id=mistake["name"])


@pytest.mark.parametrize("mistake", itertools.starmap(_marked, enumerate(MISTAKES)))
def test_a_mistake_is_answered_and_nothing_is_lost(
    here: TrainedRun, mistake: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = _prepare(here, mistake)
    for name, value in mistake.get("environment", {}).items():
        monkeypatch.setenv(name, value)
    before = here.files()
    error = CliRunner().invoke(build_app(), arguments).exception
    assert isinstance(error, errors.VeOmniError), repr(error)
    assert (type(error).__name__, exit_code(error)) == (mistake["error"], mistake["exit"]), str(error)
    assert [word for word in mistake["says"] if word not in str(error)] == [], str(error)
    if not mistake.get("only_training", False):
        dry = CliRunner().invoke(build_app(), [*arguments, "--dry-run"]).exception
        assert (type(dry), str(dry)) == (type(error), str(error))
    assert here.files() == before
    assert not (here.root / "new").exists()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "started"),
    [("a misspelt kernel", "anew"), ("half an optimizer", "as a fork"), ("a path through a file", "as a fork")],
)
def test_the_real_command_prints_the_error_alone(here: TrainedRun, name: str, started: str) -> None:
    mistake = next(each for each in MISTAKES if each["name"] == name)
    arguments = _prepare(here, mistake)
    if started == "anew":
        command = [sys.executable, "-m", "veomni_core.cli", *arguments]
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    else:
        result = veomni(*arguments)
    assert result.returncode == mistake["exit"]
    assert "\nerror: " in f"\n{result.stderr}" and "Traceback" not in result.stderr
    assert all(word in result.stderr for word in mistake["says"])


def test_the_table_is_long_enough_and_names_each_mistake_once() -> None:
    assert len(MISTAKES) >= 60
    assert len({mistake["name"] for mistake in MISTAKES}) == len(MISTAKES)
