"""What is seen of a run while it trains and afterwards: trackers, the live report, and runs on one page."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from veomni_core.cli.app import build_app
from veomni_core.errors import ConfigError, HostError
from veomni_trainer.loop.measures import StepClock
from veomni_trainer.output.folder import RunFolder
from veomni_trainer.run import record

Train = Callable[..., bool]


def _report(*arguments: str | Path) -> Any:
    return CliRunner().invoke(build_app(), ["report", *map(str, arguments)])


@pytest.mark.thorough
def test_rows_reach_tensorboard_and_runs_are_put_on_one_page(
    job_data: dict[str, Any], train: Train, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = []
    write = record.write_report
    monkeypatch.setattr(record, "_SECONDS_BETWEEN", 0.0)
    monkeypatch.setattr(record, "_LARGEST_SHARE", 1e9)
    monkeypatch.setattr(record, "write_report", lambda *args: (states.append(args[1].state), write(*args)))
    train(job_data, "train.report_to=[tensorboard]", "train.log_every=2")
    assert set(states) == {"running"}
    assert json.loads((run / "summary.json").read_text())["ending"]["state"] == "complete"

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard")).Reload()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for key in ("loss", "grad_norm", "step_seconds"):
        sent = [(event.step, event.value) for event in events.Scalars(f"train/{key}")]
        assert sent == [(row["step"], pytest.approx(row[key], rel=1e-6)) for row in rows]

    other = tmp_path / "other" / "run"
    shutil.copytree(run, other)
    (other / "job.yaml").write_text((run / "job.yaml").read_text().replace("batch_size: 2", "batch_size: 3"))
    (other / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:1]))
    (other / "summary.json").unlink()
    assert _report(other).exit_code == 0
    assert json.loads((other / "summary.json").read_text())["ending"]["state"] == "unfinished"
    page = tmp_path / "both.html"
    found = _report(run, other, "--output", page, "--json")
    assert json.loads(found.stdout)["jobs"] == {"train.batch_size": {f"{tmp_path.name}/run": 2, "other/run": 3}}
    assert "other/run" in page.read_text(encoding="utf-8")

    precious = tmp_path / "notes.txt"
    precious.write_text("mine")
    for arguments, words in [
        ([run, other, "--output", precious], "exists and is no report"),
        ([run, run], "named twice"),
        ([run] * 9, "at most 8"),
        ([run, tmp_path], "is not the folder of a run: it has no metrics.jsonl"),
        ([run, "--output", page], "--output names the page of several runs"),
    ]:
        error = _report(*arguments).exception
        assert isinstance(error, ConfigError) and words in str(error)
    assert precious.read_text() == "mine"


def test_a_tracker_that_is_not_installed_is_named_before_anything_starts(
    job_data: dict[str, Any], train: Train, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(HostError, match=r"wandb is not installed here. Install it with pip install 'veomni-trainer"):
        record.check_trackers(["wandb"])


def test_a_run_that_fails_has_a_report_that_says_so(
    job_data: dict[str, Any], train: Train, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("a cable was pulled")

    monkeypatch.setattr(record, "append_metrics", fail)
    with pytest.raises(RuntimeError, match="a cable"):
        train(job_data)
    assert "RuntimeError: a cable was pulled" in RunFolder(run).report.read_text(encoding="utf-8")


def test_a_wait_is_left_out_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    clock = StepClock()
    clock.start()
    now += 5.0
    clock.leave_out(3.0)
    clock.end_step()
    assert clock.read()["step_seconds"] == 2.0
