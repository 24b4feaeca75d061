"""The end of a run: ``summary.json``, the self-contained ``report.html``, and a few lines for the terminal."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2

from veomni_core.tables import render_table
from veomni_trainer.output.files import write_whole
from veomni_trainer.output.folder import RunFolder
from veomni_trainer.output.metrics import Row, figures, read_metrics
from veomni_trainer.output.strict_json import to_json, with_nan
from veomni_trainer.report.charts import draw_charts
from veomni_trainer.report.comparison import Comparison, compare_rows
from veomni_trainer.report.heat_map import draw_loads
from veomni_trainer.report.progress import gigabytes


def write_report(folder: RunFolder) -> None:
    """Write ``summary.json`` and ``report.html`` from the files in ``folder``, and in ``folder/eager`` if it exists."""
    loads = read_metrics(folder.expert_rows)
    rows, eager_rows = read_metrics(folder.metrics), read_metrics(folder.compared("eager").metrics)
    comparison = compare_rows(rows, eager_rows)
    receipt = json.loads(folder.receipt.read_text(encoding="utf-8"))
    summary = {
        "run": figures(rows),
        "eager": figures(eager_rows),
        "comparison": comparison.to_dict() if comparison else None,
        "plan_sha256": receipt["plan_sha256"],
        "hardware": receipt["hardware"],
        "versions": _versions(receipt),
    }
    write_whole(folder.summary, to_json(summary, indent=1))
    page = (
        _environment()
        .get_template("report.html.j2")
        .render(
            name=folder.path.name,
            now=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
            run=summary["run"],
            eager=summary["eager"],
            comparison=comparison,
            charts=[*draw_charts(rows, eager_rows), *([draw_loads(loads)] if loads else [])],
            receipt=receipt,
            transformations=receipt.get("transformations", []),  # folders of earlier versions have none
            ops=[_op_row(op) for op in receipt["ops"] if op["found"] or op.get("written")],
            versions=summary["versions"],
            job=folder.job.read_text(encoding="utf-8"),
        )
    )
    write_whole(folder.report, page)


def describe_run(folder: RunFolder) -> str:
    """The summary that is printed at the end of a run."""
    parts = json.loads(folder.summary.read_text(encoding="utf-8"))
    summary = {key: with_nan(parts[key] or {}) for key in ("run", "eager", "comparison")}
    names = {"run": "this job", "eager": "all eager"}
    table = render_table(
        ("", "steps", "loss", "step", "tokens/s", "peak memory"),
        [(names[key], *_cells(summary[key])) for key in names if summary[key]],
    )
    lines = ["", table]
    if summary["comparison"]:
        lines.append(comparison_sentence(Comparison(**summary["comparison"])))
    return "\n".join([*lines, f"report: {folder.report}"])


def comparison_sentence(comparison: Comparison) -> str:
    """``Against eager: largest loss difference 1.2e-06 (step 14 of 60), 1.31 x its speed, 0.92 x its memory.``"""
    return (
        f"Against eager: largest loss difference {comparison.largest_loss_difference:.2g} (at step "
        f"{comparison.at_step}, of {comparison.steps} compared), {comparison.speed_ratio:.2f} x its speed, "
        f"{1 / comparison.memory_ratio:.2f} x its peak memory."
    )


def _cells(run: Row) -> tuple[str, ...]:
    return (
        f"{run['steps']}",
        f"{run['first_loss']:.4f} -> {run['last_loss']:.4f}",
        f"{1e3 * run['step_seconds']:,.1f} ms",
        f"{run['tokens_per_second']:,.0f}",
        gigabytes(run["peak_memory_bytes"]),
    )


def _op_row(op: dict[str, Any]) -> dict[str, Any]:
    """One op of the receipt; its sites that stay eager are grouped by reason."""
    reasons: dict[str, list[str]] = {}
    for site in op["eager"]:
        reasons.setdefault(site["reason"], []).append(site["path"] or "the model")
    return {**op, "reasons": reasons}


def _versions(receipt: dict[str, Any]) -> dict[str, str]:
    """The versions of Python, of the libraries, and of every plugin whose kernels were bound."""
    plugins = {kernel["distribution"]: kernel["version"] for kernel in receipt["kernels"]}
    ours = ("torch", "transformers", "accelerate", "veomni-core", "veomni-trainer")
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in ours}, **plugins}


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["gigabytes"] = gigabytes
    environment.globals["comparison_sentence"] = comparison_sentence
    return environment
