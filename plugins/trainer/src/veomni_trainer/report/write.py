"""Of a run's files, ``summary.json`` and the self-contained ``report.html``, and a few lines for the terminal."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import jinja2
import yaml

from veomni_core.commands import render_table
from veomni_trainer.job.precision import PRECISIONS
from veomni_trainer.output.folder import RunFolder
from veomni_trainer.output.metrics import Row, figures, read_metrics, to_json, with_nan
from veomni_trainer.report.charts import Series, draw_charts, draw_loads
from veomni_trainer.report.comparison import Comparison, compare_rows, comparison_sentence
from veomni_trainer.report.progress import duration, gigabytes
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
    said = yaml.safe_load(job) or {}
    comparison = compare_rows(rows, eager_rows, loads, read_metrics(eager.expert_rows), _dtype(receipt, said))
    earlier = json.loads(folder.summary.read_text(encoding="utf-8")) if folder.summary.exists() else {}
    ended = _ending(ending, earlier.get("ending"), rows, said)
    summary = {
        "run": figures(rows),
        "eager": figures(eager_rows),
        "comparison": asdict(comparison) if comparison else None,
        "data": data,
        "ending": asdict(ended),
        "export": export or earlier.get("export", ""),
        "plan_sha256": receipt["plan_sha256"],
        "hardware": receipt["hardware"],
        "versions": _versions(receipt),
    }
    write_whole(folder.summary, to_json(summary, indent=1))
    table = folder.profile / "table.json"
    charts = draw_charts(Series("this job", "mine", rows), Series("all eager", "eager", eager_rows))
    page = render(
        "report.html.j2",
        **summary | {"comparison": comparison_sentence(comparison) if comparison else ""},
        name=folder.path.name,
        banner=ended.banner,
        profile=json.loads(table.read_text(encoding="utf-8")) if table.exists() else None,
        charts=[*charts, *([draw_loads(loads)] if loads else [])],
        receipt=receipt,
        transformations=receipt.get("transformations", []),  # folders of earlier versions have none
        ops=[_op_row(op) for op in receipt["ops"] if op["found"] or op.get("written")],
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
    rows = [
        (
            name,
            f"{run['steps']}",
            f"{run['first_loss']:.4f} -> {run['last_loss']:.4f}",
            f"{1e3 * run['step_seconds']:,.1f} ms",
            f"{run['tokens_per_second']:,.0f}",
            gigabytes(run["peak_memory_bytes"]),
        )
        for name, run in runs.items()
    ]
    return render_table(("", "steps", "loss", "step", "tokens/s", "peak memory"), rows)


def _dtype(receipt: dict[str, Any], job: dict[str, Any]) -> str:
    """The type in which the model computes: autocast's, else that of its weights."""
    model, train = (each if isinstance(each := job.get(key), dict) else {} for key in ("model", "train"))
    precision: Any = train.get("precision") or "float32"  # jobs of earlier versions have none
    return str(receipt.get("autocast") or model.get("dtype") or PRECISIONS[precision].weights)


def _ending(known: RunEnding | None, earlier: dict[str, Any] | None, rows: list[Row], job: dict[str, Any]) -> RunEnding:
    """What ended the run: what is known, else what the last report says, unless it was written while the run went on.

    A run that has all of its steps is not unfinished.
    """
    said = RunEnding(**earlier) if earlier and earlier["state"] != "running" else RunEnding("unfinished")
    ending = known or said
    last = max((row["step"] for row in rows), default=0)
    steps = int((job.get("train") or {}).get("steps") or last)
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
        **{name: getattr(folder, name) for name in ("job", "plan", "receipt", "metrics", "summary", "report")},
        "checkpoint": checkpoints[-1][1] if checkpoints else None,
        "weights": folder.exported,
        "eager": folder.compared("eager").path,
    }
    return {
        **json.loads(folder.summary.read_text(encoding="utf-8")),
        "interrupted": interrupted,
        "paths": {name: str(path) if path and path.exists() else None for name, path in paths.items()},
    }


def render(template: str, **values: Any) -> str:
    """A page, as one self-contained file."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"gigabytes": gigabytes, "step_time": step_time, "duration": duration}
    now = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    return environment.get_template(template).render(now=now, **values)


def step_time(run: Row) -> str:
    """A run's median time of a step with its quartiles: ``116.9 ms (115.2 to 119.8)``."""
    median, (low, high) = 1e3 * run["step_seconds"], (1e3 * each for each in run["step_seconds_quartiles"])
    return f"{median:,.1f} ms ({low:,.1f} to {high:,.1f})"
