"""Jobs that are held to a lock file: trained where all is as it was, refused before their weights where it isn't."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forked_eager import veomni_and_eager
from typer.testing import CliRunner, Result

from forked_processes import Forked, finish, run_veomni
from veomni_core.cli import exit_code
from veomni_core.cli.app import build_app
from veomni_core.errors import ConfigError, LockMismatchError

EAGER_NORMS = "model.ops_implementation.rms_norm_implementation=eager"

WriteJob = Callable[[dict[str, Any]], Path]


def veomni(*arguments: str | Path) -> Result:
    return CliRunner().invoke(build_app(), [*map(str, arguments)])


def refused(*arguments: str | Path) -> str:
    """What the command's error says; it must be that something differs."""
    result = veomni(*arguments)
    assert isinstance(result.exception, LockMismatchError), result.output
    assert exit_code(result.exception) == 1
    return str(result.exception)


@pytest.fixture
def job(job_data: dict[str, Any], write_job: WriteJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job with bound norms that names its lock file, and the file."""
    monkeypatch.delenv("VEOMNI_FROZEN", raising=False)
    job_data["model"]["ops_implementation"]["rms_norm_implementation"] = "torch"
    job_data["train"] |= {"steps": 2, "frozen": "veomni.lock"}
    path = write_job(job_data)
    assert veomni("lock", path, "--output", tmp_path / "veomni.lock").exit_code == 0
    return path


@pytest.mark.thorough
def test_a_job_is_trained_as_it_was_locked(job: Path, run: Path, tmp_path: Path) -> None:
    result = veomni("train", job)
    assert result.exit_code == 0, result.output
    assert f"frozen: the plugins and the plan are those of {tmp_path / 'veomni.lock'}" in result.output
    assert (run / "checkpoint-2").is_dir()
    assert "VEOMNI_FROZEN" not in os.environ


def test_other_kernels_are_refused_with_their_sites_before_anything_is_written(job: Path, run: Path) -> None:
    for how in ([], ["--dry-run"], ["--frozen"]):
        said = refused("train", job, "--set", EAGER_NORMS, *how)
        assert "rms_norm/standard: torch -> eager at 5 site(s): model.layers.0.input_layernorm" in said
    assert "rms_norm/standard: torch -> eager" in refused("plan", job, "--set", EAGER_NORMS)
    assert not run.exists()


@pytest.mark.thorough
def test_another_precision_is_another_plan(job: Path) -> None:
    said = refused("train", job, "--set", "train.precision=bf16_mixed")
    assert "no autocast, for training -> autocast to bfloat16, for training" in said


@pytest.mark.thorough
def test_a_job_beside_it_was_not_locked(job: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(job.read_text(encoding="utf-8"), encoding="utf-8")
    assert "has no plan of other.yaml, but of job.yaml" in refused("train", other)


@pytest.mark.thorough
def test_the_option_can_be_taken_back_for_one_run(job: Path, run: Path) -> None:
    assert veomni("train", job, "--set", "train.frozen=null", "--set", EAGER_NORMS).exit_code == 0


def test_a_job_that_nobody_read_the_lock_for_is_refused(
    train: Callable[..., bool], job_data: dict[str, Any], job: Path, run: Path
) -> None:
    with pytest.raises(ConfigError, match=r"train\.frozen: the command `veomni train` reads it"):
        train(job_data)
    assert not run.exists()


@pytest.mark.thorough
def test_the_eager_run_of_a_comparison_has_a_plan_of_its_own(job: Path, run: Path) -> None:
    result = veomni_and_eager("train", job, "--compare", "eager")
    assert result.returncode == 0, result.stderr
    assert (run / "eager" / "summary.json").exists()


def on_two_ranks(job: Path, *of_each: dict[str, str]) -> str:
    """Train with a process for each of these environments; gives their error, which must be the same."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": "2"}
    ranks = [
        Forked(
            run_veomni,
            "train",
            str(job),
            environment={**os.environ, **address, "RANK": str(rank), "LOCAL_RANK": str(rank), **environment},
            path=[environment["PYTHONPATH"]] if "PYTHONPATH" in environment else [],
        )
        for rank, environment in enumerate(of_each)
    ]
    first, second = finish(ranks, timeout=120)  # one that waits does so for 300 s
    assert (first.returncode, second.returncode) == (1, 1)
    assert first.stderr == second.stderr
    return first.stderr


def test_both_processes_end_where_one_has_another_plugin(job: Path, run: Path, tmp_path: Path) -> None:
    info = tmp_path / "newer" / "acme_more-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-more\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[veomni.plugins]\nacme-more = nothing_of_this_name\n")
    said = on_two_ranks(job, {}, {"PYTHONPATH": str(info.parent)})
    assert "error: 1 of 2 ranks are refused:\nrank 1: what is installed differs from" in said
    assert "acme-more 1.0 was added" in said
    assert not run.exists()


def test_both_processes_end_where_one_names_another_lock_file(job: Path, run: Path) -> None:
    said = on_two_ranks(job, {"VEOMNI_FROZEN": "another.lock"}, {})
    assert "error: 1 of 2 ranks are refused:\nrank 0: different lock files are named" in said
    assert not run.exists()
