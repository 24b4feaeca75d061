"""Of a run's files, ``summary.json`` and the self-contained ``report.html``, and a few lines for the terminal."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import yaml

from veomni_core.commands import render_table
from veomni_trainer.job.precision import PRECISIONS
from veomni_trainer.output.folder import RunFolder
from veomni_trainer.output.metrics import Row, figures, read_metrics, to_json, with_nan
from veomni_trainer.report.charts import Series, draw_charts, draw_loads
from veomni_trainer.report.comparison import Comparison, compare_rows, comparison_sentence
from veomni_trainer.report.page import render
from veomni_trainer.report.progress import gigabytes
from veomni_transformers.whole_files import write_whole

State = Literal["running", "complete", "interrupted", "diverged", "failed", "unfinished"]


@dataclass(frozen=True)
class RunEnding:
    """What ended a run.

    Attributes:
        state: ``unfinished`` is a run that was killed, or that still runs: its files don't say which.
        reason: what a diverged or failed run ended with.
        step: the last step with a row of metrics.
        steps: how many steps the job has.
    """

    state: State
    reason: str = ""
    step: int = 0
    steps: int = 0

    @property
    def banner(self) -> str:
        """What the report says on top; empty for a complete run."""
        where = f"step {self.step} of {self.steps}"
        return {
            "complete": "",
            "running": f"Written while the job runs, at {where}.",
            "interrupted": f"Interrupted after {where}. Continue it with --resume.",
            "diverged": f"Training ended at {where} with a loss or gradient that is not finite: {self.reason}.",
            "failed": f"Training ended with an error after {where}: {self.reason}",
            "unfinished": f"Not finished: the last row is that of {where}. The job was killed, or still runs.",
        }[self.state]


def write_report(folder: RunFolder, ending: RunEnding | None = None, export: str = "") -> None:
    """Write ``summary.json`` and ``report.html`` from the files in ``folder``, and in ``folder/eager`` if it exists.

    Args:
        folder: of a run that has done a step.
        ending: what ended the run, if the caller knows; otherwise what an earlier report says, and the rows.
        export: what was found of the exported weights; otherwise what an earlier report says.
    """
    eager = folder.compared("eager")
    loads = read_metrics(folder.expert_rows)
    rows, eager_rows = read_metrics(folder.metrics), read_metrics(eager.metrics)
    receipt = json.loads(folder.receipt.read_text(encoding="utf-8"))
    data = json.loads(folder.data.read_text(encoding="utf-8")) if folder.data.exists() else []  # earlier versions
    job = folder.job.read_text(encoding="utf-8")
    comparison = compare_rows(rows, eager_rows, loads, read_metrics(eager.expert_rows), _dtype(receipt, job))
    ended = _complete(ending or _known_ending(folder), rows, job)
    summary = {
        "run": figures(rows),
        "eager": figures(eager_rows),
        "comparison": asdict(comparison) if comparison else None,
        "data": data,
        "ending": asdict(ended),
        "export": export or _earlier(folder).get("export", ""),
        "plan_sha256": receipt["plan_sha256"],
        "hardware": receipt["hardware"],
        "versions": _versions(receipt),
    }
    write_whole(folder.summary, to_json(summary, indent=1))
    table = folder.profile / "table.json"
    charts = draw_charts(Series("this job", "mine", rows), Series("all eager", "eager", eager_rows))
    page = render(
        "report.html.j2",
        name=folder.path.name,
        banner=ended.banner,
        run=summary["run"],
        eager=summary["eager"],
        comparison=comparison,
        export=summary["export"],
        profile=json.loads(table.read_text(encoding="utf-8")) if table.exists() else None,
        data=data,
        charts=[*charts, *([draw_loads(loads)] if loads else [])],
        receipt=receipt,
        transformations=receipt.get("transformations", []),  # folders of earlier versions have none
        ops=[_op_row(op) for op in receipt["ops"] if op["found"] or op.get("written")],
        versions=summary["versions"],
        job=job,
    )
    write_whole(folder.report, page)


def describe_run(folder: RunFolder) -> str:
    """The summary that is printed at the end of a run."""
    parts = json.loads(folder.summary.read_text(encoding="utf-8"))
    summary = {key: with_nan(parts[key] or {}) for key in ("run", "eager", "comparison")}
    names = {"run": "this job", "eager": "all eager"}
    table = figures_table({names[key]: summary[key] for key in names if summary[key]})
    lines = ["", table]
    if summary["comparison"]:
        lines.append(comparison_sentence(Comparison(**summary["comparison"])))
    return "\n".join([*lines, f"report: {folder.report}"])


def figures_table(runs: dict[str, Row]) -> str:
    """The key figures of runs by their names, as text."""
    heads = ("", "steps", "loss", "step", "tokens/s", "peak memory")
    return render_table(heads, [(name, *_cells(run)) for name, run in runs.items()])


def _cells(run: Row) -> tuple[str, ...]:
    return (
        f"{run['steps']}",
        f"{run['first_loss']:.4f} -> {run['last_loss']:.4f}",
        f"{1e3 * run['step_seconds']:,.1f} ms",
        f"{run['tokens_per_second']:,.0f}",
        gigabytes(run["peak_memory_bytes"]),
    )


def _dtype(receipt: dict[str, Any], job: str) -> str:
    """The type in which the model computes: autocast's, else that of its weights."""
    said = yaml.safe_load(job) or {}
    model, train = (each if isinstance(each := said.get(key), dict) else {} for key in ("model", "train"))
    precision: Any = train.get("precision") or "float32"  # jobs of earlier versions have none
    return str(receipt.get("autocast") or model.get("dtype") or PRECISIONS[precision].weights)


def _known_ending(folder: RunFolder) -> RunEnding:
    """What the last report says of the run's end. One that was written while it ran says nothing of that."""
    found = _earlier(folder).get("ending")
    return RunEnding(**found) if found and found["state"] != "running" else RunEnding("unfinished")


def _earlier(folder: RunFolder) -> dict[str, Any]:
    """The summary that an earlier report wrote."""
    found: dict[str, Any] = json.loads(folder.summary.read_text(encoding="utf-8")) if folder.summary.exists() else {}
    return found


def _complete(ending: RunEnding, rows: list[Row], job: str) -> RunEnding:
    """``ending`` with the run's steps; a run that has all of them is not unfinished."""
    train = (yaml.safe_load(job) or {}).get("train") or {}
    last = max((row["step"] for row in rows), default=0)
    steps = int(train.get("steps") or last)
    done = ending.state == "unfinished" and last >= steps
    return replace(ending, state="complete" if done else ending.state, step=last, steps=steps)


def _op_row(op: dict[str, Any]) -> dict[str, Any]:
    """One op of the receipt; its sites that stay eager are grouped by reason."""
    reasons: dict[str, list[str]] = {}
    for site in op["eager"]:
        reasons.setdefault(site["reason"], []).append(site["path"] or "the model")
    return {**op, "reasons": reasons}


def _versions(receipt: dict[str, Any]) -> dict[str, str]:
    """The versions of Python, of the libraries, and of every plugin whose kernels were bound."""
    plugins = {kernel["distribution"]: kernel["version"] for kernel in receipt["kernels"]}
    ours = ("torch", "transformers", "accelerate", "veomni-core", "veomni-trainer", "veomni-transformers")
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in ours}, **plugins}


def outcome(folder: RunFolder, interrupted: bool) -> dict[str, Any]:
    """The content of ``summary.json``, whether an interrupt ended the run, and the paths of what is there now."""
    checkpoints = folder.checkpoints()
    paths = {
        "output_dir": folder.path,
        "job": folder.job,
        "plan": folder.plan,
        "receipt": folder.receipt,
        "metrics": folder.metrics,
        "summary": folder.summary,
        "report": folder.report,
        "checkpoint": checkpoints[-1][1] if checkpoints else None,
        "weights": folder.exported,
        "eager": folder.compared("eager").path,
    }
    return {
        **json.loads(folder.summary.read_text(encoding="utf-8")),
        "interrupted": interrupted,
        "paths": {name: str(path) if path and path.exists() else None for name, path in paths.items()},
    }
