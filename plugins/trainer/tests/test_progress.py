"""Progress as it is shown: lines in a log, a bar on a terminal."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from veomni_trainer.report.progress import Progress


def test_progress_is_a_line_now_and_then_in_a_log_and_a_bar_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"step": n, "loss": 2.0, "tokens_per_second": 1234.5, "peak_memory_bytes": 10**9} for n in range(1, 6)]
    progress = Progress(total=5)
    with progress.running():
        for row in rows:
            progress.show(row)
        progress.show({"step": 5, "validation_loss": 1.5})
    assert capsys.readouterr().out == (
        "step 1/5  loss 2.0000  1,234 tok/s  1.00 GB\n"
        "step 5/5  loss 2.0000  1,234 tok/s  1.00 GB\n"
        "step 5/5  validation loss 1.5000\n"
    )
    terminal = Console(force_terminal=True, width=100, file=io.StringIO())
    progress = Progress(total=5, done=2, console=terminal)
    with progress.running():
        progress.show(rows[3])
        progress.show({"step": 4, "validation_loss": 1.5})
    shown = terminal.file.getvalue()
    assert "4/5" in shown
    assert "validation loss 1.5000" in shown


def test_all_that_a_job_prints_keeps_to_the_terminals_width(
    job_data: dict[str, Any],
    train: Callable[..., bool],
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    train(job_data, "train.steps=1", "train.save_every=never")
    printed = capsys.readouterr().out
    assert {"attn_implementation", "tokens/s", str(run / "report.html")} <= {*printed.split()}
    assert all(len(line) <= 60 or len(line.split()) == 1 for line in printed.splitlines())
