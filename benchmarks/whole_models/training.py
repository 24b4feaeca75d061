"""Whole training jobs on this machine: `preset: auto`, against transformers as it comes and against everything eager.

    python benchmarks/whole_models/training.py examples/qwen3_moe_bf16_h200.yaml examples/llama_bf16_h200.yaml

Each job runs as users run it, by ``veomni train`` in a process of its own, once per setting, with one seed and the same
data. A job with experts also runs with transformers' own ``grouped_mm`` in place of the chosen experts' kernel, all
else the same. Writes ``benchmarks/results/training_<gpu>.json`` and a picture of each job's losses.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root, for `benchmarks`

from benchmarks.shared.results import PICTURES, machine, write_results
from benchmarks.whole_models.page import plot


@dataclass(frozen=True)
class Setting:
    """Which kernels a job runs with: its ``ops_implementation``, and further changes to the job."""

    name: str
    ops_implementation: str
    changes: tuple[str, ...] = ()


_OWN_GROUPED_MM = ("model.config.experts_implementation=grouped_mm",)
AUTO = Setting("preset: auto", "{preset: auto}")
GROUPED_MM = Setting("auto, experts by transformers", "{preset: auto, moe_implementation: eager}", _OWN_GROUPED_MM)
DEFAULTS = Setting("transformers' defaults", "{preset: eager, attn_implementation: sdpa}")
EAGER = Setting("preset: eager", "{preset: eager}")
VEOMNI = [sys.executable, "-m", "veomni_core.cli"]


def settings_of(job: Path, skipped: Iterable[str]) -> list[Setting]:
    """What ``job`` is run with: the experts' alternatives only where its model has experts."""
    has_experts = "num_experts" in yaml.safe_load(job.read_text())["model"]["config"]
    settings = [AUTO, *([GROUPED_MM] if has_experts else []), DEFAULTS, EAGER]
    return [setting for setting in settings if setting.name not in skipped]


def train(job: Path, setting: Setting, run: Path, changes: list[str]) -> dict[str, Any]:
    """Run ``job`` to its end; gives its figures, losses and receipt."""
    command = [*VEOMNI, "train", str(job), "--set", f"model.ops_implementation={setting.ops_implementation}"]
    for change in [f"train.output_dir={json.dumps(str(run))}", *setting.changes, *changes]:
        command += ["--set", change]
    subprocess.run(command, check=True, stdout=sys.stderr)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        **json.loads((run / "summary.json").read_text())["run"],
        "losses": [row["loss"] for row in rows if "loss" in row],
        "receipt": json.loads((run / "receipt.json").read_text()),
    }


def row(job: Path, setting: str, runs: dict[str, dict[str, Any]]) -> tuple[str, ...]:
    """One line of the table; ratios are of ``preset: auto`` to the line's own setting."""
    auto, this = runs[AUTO.name], runs[setting]
    difference = max(abs(a - b) for a, b in zip(auto["losses"], this["losses"], strict=True))
    return (
        job.stem,
        setting,
        f"{this['tokens_per_second']:,.0f}",
        f"{1e3 * this['step_seconds']:.0f} ms",
        f"{this['tflops']:.0f} ({this['mfu']:.0%})" if "mfu" in this else "-",
        f"{this['peak_memory_bytes'] / 2**30:.1f} GiB",
        f"{this['losses'][-1]:.3f}",
        f"{difference:.2g}",
        f"{auto['tokens_per_second'] / this['tokens_per_second']:.2f}x",
        f"{auto['peak_memory_bytes'] / this['peak_memory_bytes']:.2f}x",
    )


def receipt_text(job: Path, receipt: dict[str, Any]) -> str:
    """The receipt of one run as a list."""
    lines = [f"Receipt of `{job.stem}` under `preset: auto`:", ""]
    for op in receipt["ops"]:
        if op["found"]:
            reasons = "; ".join(dict.fromkeys(left["reason"] for left in op["eager"]))
            chosen = ", ".join(op["chosen"])
            lines.append(
                f"- `{op['field']}`: {chosen}, {op['bound']}/{op['found']} sites" + f" ({reasons})" * bool(reasons)
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="+", type=Path)
    parser.add_argument("--set", dest="changes", action="append", default=[], metavar="a.b=c")
    parser.add_argument("--skip", nargs="*", default=[], help="settings to leave out, by their names")
    parser.add_argument("--name", default="training_h200")
    options = parser.parse_args()
    data: dict[str, Any] = {"machine": machine(), "jobs": {}}
    rows, notes = [], []
    with tempfile.TemporaryDirectory() as temporary:
        for job in options.jobs:
            runs = {
                setting.name: train(job, setting, Path(temporary) / f"{job.stem}-{number}", options.changes)
                for number, setting in enumerate(settings_of(job, options.skip))
            }
            data["jobs"][job.stem] = {"runs": runs, "changes": options.changes}
            plot(runs, PICTURES / f"{options.name}_{job.stem}.svg")
            rows += [row(job, setting, runs) for setting in runs]
            if options.changes:
                notes.append(f"`{job.stem}` was run with `{'`, `'.join(options.changes)}`.")
            notes.append(receipt_text(job, runs[AUTO.name]["receipt"]))
    columns = ("job", "kernels", "tokens/s", "step", "TFLOP/s (MFU)", "peak memory", "last loss")
    columns += ("largest loss difference",)
    write_results(
        options.name,
        "Training jobs: the installed kernels against transformers",
        data,
        (*columns, "speed of auto", "memory of auto"),
        rows,
        "\n\n".join(notes),
        script=__file__,
    )


if __name__ == "__main__":
    main()
