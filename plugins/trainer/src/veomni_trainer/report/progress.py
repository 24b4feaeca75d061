"""Shows the progress of training: a bar on a terminal, an occasional line in a log."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from veomni_core.commands import fit
from veomni_trainer.output.metrics import Row

_SECONDS_BETWEEN_LINES = 5.0
# What a method measures beside its loss, by its name in a row, and the names under which it is shown.
_SHOWN = {
    "mean_token_accuracy": "token accuracy",
    "reward": "reward",
    "rewards/accuracies": "accuracy",
    "rewards/margins": "margin",
    "accuracy": "accuracy",
    "margin": "margin",
    "kl": "KL",
}


class Progress:
    """Displays rows of metrics."""

    def __init__(self, total: int, done: int = 0, console: Console | None = None) -> None:
        self._console = console or Console()
        self._total, self._done = total, done
        self._last_line = 0.0
        self._began, self._first = time.monotonic(), done
        self._bar: Bar | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Show the bar while training runs."""
        if not self._console.is_terminal:
            yield
            return
        columns = [
            TextColumn("training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        ]
        with Bar(*columns, console=self._console, expand=True) as self._bar:
            self._task = self._bar.add_task("training", total=self._total, completed=self._done, figures="")
            yield
        self._bar = None

    def show(self, row: Row) -> None:
        """Display one row."""
        line = f"step {row['step']}/{self._total}  {describe(row)}"
        if self._bar is None:
            now = time.monotonic()
            if now - self._last_line >= _SECONDS_BETWEEN_LINES or row["step"] >= self._total or "loss" not in row:
                self._last_line = now
                print(fit(f"{line}{self._left(row['step'], now)}"), flush=True)
        elif "loss" in row:
            self._bar.update(self._task, completed=row["step"], figures=describe(row))
        else:
            self._bar.console.print(line, highlight=False)

    def _left(self, step: int, now: float) -> str:
        """The time since the start, and about how much is left; in a log, where no bar shows them."""
        spent, done = now - self._began, step - self._first
        if done <= 0 or spent < _SECONDS_BETWEEN_LINES:
            return ""
        left = spent / done * max(self._total - step, 0)
        return f"  {duration(spent)}, {duration(left)} left" if left else f"  {duration(spent)}"


def describe(row: Row) -> str:
    """One row as text: ``loss 2.1034  learned 512  5,301 tok/s  1.32 GB``; and what was measured of experts.

    ``experts 1.42x  ranks 1.10x  sent 0.52 GB``: the busiest expert and rank have so many times the mean of rows, and
    ranks sent each other so much.
    """
    if "loss" not in row:
        return f"validation loss {row['validation_loss']:.4f}"
    learned = f"  learned {row['learned_tokens']:,}" if "learned_tokens" in row else ""
    speed = f"{row['tokens_per_second']:,.0f} tok/s"
    if "tokens_per_second_each" in row:
        speed += f" ({row['tokens_per_second_each']:,.0f} each)"
    if "mfu" in row:
        speed += f"  {row['tflops']:,.0f} TFLOP/s ({row['mfu']:.0%} MFU)"
    method = f"  {figures}" if (figures := shown(row)) else ""
    text = f"loss {row['loss']:.4f}{method}{learned}  {speed}  {gigabytes(row['peak_memory_bytes'])}"
    for key, name in (("expert_load", "experts"), ("rank_load", "ranks")):
        text += f"  {name} {row[key]:.2f}x" if key in row else ""
    return text + (f"  sent {gigabytes(row['dispatch_bytes'])}" if "dispatch_bytes" in row else "")


def shown(row: Row) -> str:
    """The figures of ``row`` that say how its method does.

    Example:
        >>> shown({"loss": 0.1, "reward": 0.5, "kl": 0.01})
        'reward 0.5  KL 0.01'
    """
    return "  ".join(f"{title} {row[name]:.3g}" for name, title in _SHOWN.items() if name in row)


def duration(seconds: float) -> str:
    """Seconds as ``0:07``, ``12:05`` or ``3:00:01``.

    Example:
        >>> duration(7.4), duration(725), duration(10801)
        ('0:07', '12:05', '3:00:01')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def gigabytes(count: float) -> str:
    """Bytes as ``1.32 GB``."""
    return f"{count / 1e9:.2f} GB"
