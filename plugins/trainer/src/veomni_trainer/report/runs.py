"""Compares any runs: their figures and curves together, and where their jobs and plans differ."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from veomni_core import Plan
from veomni_core.commands import load_yaml
from veomni_core.errors import ConfigError
from veomni_trainer.job.resuming import flat_keys
from veomni_trainer.output.folder import RunFolder
from veomni_trainer.output.metrics import Row, figures, read_metrics
from veomni_trainer.report.charts import Series, draw_charts
from veomni_trainer.report.drawing import COLOURS
from veomni_trainer.report.write import render
from veomni_transformers.whole_files import write_whole

_MARK = '<meta name="generator" content="veomni report">'


@dataclass(frozen=True)
class Run(Series):
    """A run among others: what it is called there, its colour, and what its folder holds."""

    figures: Row
    job: dict[str, Any]
    plan: Plan


def _read_run(path: Path, label: str, colour: str) -> Run:
    """The run in the folder ``path``, if it has done a step.

    Raises:
        ConfigError: ``path`` isn't one, or its files can't be read.
    """
    folder = RunFolder(path)
    missing = [each.name for each in (folder.metrics, folder.receipt, folder.plan, folder.job) if not each.is_file()]
    if missing:
        raise ConfigError(
            f"{path} is not the folder of a run: it has no {', '.join(missing)}. Name the train.output_dir of a job "
            "that has done a step"
        )
    try:
        json.loads(folder.receipt.read_text(encoding="utf-8"))
        plan, job = Plan.from_json(folder.plan.read_text(encoding="utf-8")), load_yaml(folder.job)
        rows = read_metrics(folder.metrics)
        run = Run(label, colour, rows, figures(rows), job, plan)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: the run's files can't be read: {error}") from error
    if not run.figures:
        raise ConfigError(f"{folder.metrics} has no row of a step yet; wait until the run has logged one")
    return run


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """The runs in the folders ``paths``, each with the shortest name that tells it from the others.

    Raises:
        ConfigError: a folder holds no run, is named twice, or there are too many.
    """
    resolved = [path.resolve() for path in paths]
    if len(paths) > len(COLOURS):
        raise ConfigError(f"{len(paths)} runs can't be told apart on one page; name at most {len(COLOURS)}")
    if twice := [str(path) for number, path in enumerate(paths) if resolved[number] in resolved[:number]]:
        raise ConfigError(f"{', '.join(twice)}: named twice; name each run once")
    return [_read_run(*each) for each in zip(paths, _labels(resolved), COLOURS, strict=False)]


def _labels(paths: Sequence[Path]) -> list[str]:
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        labels = ["/".join(path.parts[-depth:]) for path in paths]
        if len({*labels}) == len(labels):
            return labels
    return [str(path) for path in paths]


def different_keys(runs: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """The keys of the jobs whose values differ, each with every run's value."""
    jobs = {run.label: flat_keys(run.job) for run in runs}
    keys = dict.fromkeys(key for job in jobs.values() for key in job if key != "train.output_dir")
    values = {key: {label: job.get(key, "not there") for label, job in jobs.items()} for key in keys}
    return {key: each for key, each in values.items() if len({repr(value) for value in each.values()}) > 1}


def different_plans(runs: Sequence[Run]) -> dict[str, tuple[str, ...]]:
    """What each plan but the first one runs otherwise than the first."""
    return {run.label: runs[0].plan.diff(run.plan) for run in runs[1:]}


def comparison_of(runs: Sequence[Run]) -> Mapping[str, Any]:
    """Figures and differences as plain data."""
    return {
        "runs": {run.label: run.figures for run in runs},
        "jobs": different_keys(runs),
        "plans": {label: list(changes) for label, changes in different_plans(runs).items()},
    }


def write_comparison(runs: Sequence[Run], output: Path) -> None:
    """Write the page.

    Raises:
        ConfigError: ``output`` is a file that this function hasn't written, or a folder.
    """
    if output.is_dir() or (output.exists() and _MARK not in output.read_text(encoding="utf-8", errors="replace")):
        raise ConfigError(f"--output {output}: exists and is no report; name another file")
    page = render(
        "runs.html.j2",
        name=" and ".join(run.label for run in runs) if len(runs) < 4 else f"{len(runs)} runs",
        runs=runs,
        charts=draw_charts(*runs),
        jobs=different_keys(runs),
        plans=different_plans(runs),
    )
    write_whole(output, page)
