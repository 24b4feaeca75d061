"""Whole training jobs on this machine: `preset: auto`, against transformers as it comes and against everything eager.

    python benchmarks/training.py examples/qwen3_moe_bf16_h200.yaml examples/llama_bf16_h200.yaml

Each job runs as users run it, by ``veomni train`` in a process of its own, once per setting, with one seed and the same
data. ``preset: gpu`` is planned as well, and what the command line answers is kept. Writes
``docs/benchmarks/training_<gpu>.json`` and ``.md``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from results import machine, write_results

SETTINGS = {
    "preset: auto": "{preset: auto}",
    "transformers' defaults": "{preset: eager, attn_implementation: sdpa}",
    "preset: eager": "{preset: eager}",
}
VEOMNI = [sys.executable, "-m", "veomni_core.cli"]


def train(job: Path, ops_implementation: str, run: Path, changes: list[str]) -> dict[str, Any]:
    """Run ``job`` to its end; gives its figures, losses and receipt."""
    command = [*VEOMNI, "train", str(job), "--set", f"model.ops_implementation={ops_implementation}"]
    for change in [f"train.output_dir={json.dumps(str(run))}", *changes]:
        command += ["--set", change]
    subprocess.run(command, check=True, stdout=sys.stderr)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        **json.loads((run / "summary.json").read_text())["run"],
        "losses": [row["loss"] for row in rows if "loss" in row],
        "receipt": json.loads((run / "receipt.json").read_text()),
    }


def refusal(job: Path) -> dict[str, Any]:
    """What the command line says to ``preset: gpu`` where some of its kernels are not installed."""
    command = [*VEOMNI, "train", str(job), "--set", "model.ops_implementation={preset: gpu}"]
    result = subprocess.run(command, capture_output=True, text=True)
    return {"exit code": result.returncode, "says": (result.stdout + result.stderr).strip()}


def row(job: Path, setting: str, runs: dict[str, dict[str, Any]]) -> tuple[str, ...]:
    """One line of the table; ratios are of ``preset: auto`` to the line's own setting."""
    auto, this = runs["preset: auto"], runs[setting]
    difference = max(abs(a - b) for a, b in zip(auto["losses"], this["losses"], strict=True))
    return (
        job.stem,
        setting,
        f"{this['tokens_per_second']:,.0f}",
        f"{1e3 * this['step_seconds']:.0f} ms",
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
    parser.add_argument("--name", default="training_h200")
    options = parser.parse_args()
    data: dict[str, Any] = {"machine": machine(), "jobs": {}}
    rows, notes = [], []
    with tempfile.TemporaryDirectory() as temporary:
        for job in options.jobs:
            runs = {
                setting: train(job, ops, Path(temporary) / f"{job.stem}-{number}", options.changes)
                for number, (setting, ops) in enumerate(SETTINGS.items())
            }
            asked = refusal(job)
            data["jobs"][job.stem] = {"runs": runs, "preset: gpu": asked, "changes": options.changes}
            rows += [row(job, setting, runs) for setting in SETTINGS]
            notes.append(receipt_text(job, runs["preset: auto"]["receipt"]))
            notes.append(f"`preset: gpu` ends with {asked['exit code']}:\n\n```\n{asked['says']}\n```")
    columns = ("job", "kernels", "tokens/s", "step", "peak memory", "last loss", "largest loss difference")
    write_results(
        options.name,
        "Training jobs: veomni-torch's kernels against transformers",
        data,
        (*columns, "speed of auto", "memory of auto"),
        rows,
        "\n\n".join(notes),
        script="training.py",
    )


if __name__ == "__main__":
    main()
