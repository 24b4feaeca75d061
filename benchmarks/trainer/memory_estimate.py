"""The memory that ``veomni train --dry-run`` estimates, beside the peak of the same job when it trains.

    python benchmarks/trainer/memory_estimate.py examples/llama_bf16_h200.yaml examples/qwen3_moe_bf16_h200.yaml

Each job runs with each setting: first the dry run, then three steps, each in a process of its own. Writes
``benchmarks/results/memory_estimate_<gpu>.json``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root, for `benchmarks`

from benchmarks.shared.results import machine, write_results

SETTINGS = {
    "preset: auto": (),
    "transformers' defaults": ("model.ops_implementation={preset: eager, attn_implementation: sdpa}",),
    "preset: auto, gradient checkpointing": ("train.gradient_checkpointing=true",),
}
PARTS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations": "activations",
    "logits": "head and loss",
    "brief": "brief",
    "total": "estimate",
    "peak": "peak",
}
STEPS = 3
_DRY_RUN = """
import json, sys
from pathlib import Path
from veomni_trainer.job.load import load_job
from veomni_trainer.run.dry_run import dry_run

print(json.dumps(dry_run(load_job(Path(sys.argv[1]), sys.argv[2:]), overwrite=True).to_dict()))
"""


def measure(job: Path, changes: tuple[str, ...], run: Path) -> dict[str, Any]:
    """The estimate's parts, and the peak of training, in bytes."""
    changes = (*changes, f"train.output_dir={json.dumps(str(run))}", f"train.steps={STEPS}", "train.warmup=0")
    estimated = subprocess.run(
        [sys.executable, "-c", _DRY_RUN, str(job), *changes], check=True, stdout=subprocess.PIPE, text=True
    )
    command = [sys.executable, "-m", "veomni_core.cli", "train", str(job), "--overwrite"]
    for change in (*changes, "train.save_every=never"):
        command += ["--set", change]
    subprocess.run(command, check=True, stdout=sys.stderr)
    summary = json.loads((run / "summary.json").read_text())
    found: dict[str, Any] = json.loads(estimated.stdout.splitlines()[-1])
    return {**found["memory"], "peak": summary["run"]["peak_memory_bytes"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="+", type=Path)
    parser.add_argument("--name", default="memory_estimate_h200")
    options = parser.parse_args()
    data: dict[str, Any] = {"machine": machine(), "steps": STEPS, "jobs": {}}
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        for job in options.jobs:
            for number, (setting, changes) in enumerate(SETTINGS.items()):
                found = measure(job, changes, Path(temporary) / f"{job.stem}-{number}")
                data["jobs"].setdefault(job.stem, {})[setting] = found
                parts = [found[part] for part in PARTS]
                gigabytes = [f"{part / 1e9:.2f}" for part in parts]
                rows.append((job.stem, setting, *gigabytes, f"{found['total'] / found['peak']:.2f}"))
    write_results(
        options.name,
        "The memory estimate of a dry run against the peak of training, in GB",
        data,
        ("job", "setting", *PARTS.values(), "estimate / peak"),
        rows,
        script=__file__,
    )


if __name__ == "__main__":
    main()
