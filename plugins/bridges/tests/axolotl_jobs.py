"""Runs Axolotl jobs, each in a fork of this process, which has imported Axolotl: ``axolotl_jobs.py JOBS.json``.

The file maps the name of each job to its keys. For each a line of JSON is printed: the losses and gradient norms that
its Trainer recorded and the receipt, or the error that ended it.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import axolotl.cli.train
import axolotl.core.builders
import axolotl.train
import yaml
from library_names import differences, names_of

from veomni_core.errors import VeOmniError


def train(name: str, job: dict[str, Any]) -> None:
    Path(f"{name}.yaml").write_text(yaml.safe_dump(job), encoding="utf-8")
    output = Path(job["output_dir"])
    try:
        axolotl.cli.train.do_cli(f"{name}.yaml")
    except VeOmniError as error:
        result: dict[str, Any] = {"error": type(error).__name__, "message": str(error)}
    else:
        state = json.loads((output / f"checkpoint-{job['max_steps']}" / "trainer_state.json").read_text())
        steps = [row for row in state["log_history"] if "loss" in row]
        receipt = output / "veomni_receipt.json"
        result = {
            "measured": [row[key] for row in steps for key in ("loss", "grad_norm")],
            "receipt": json.loads(receipt.read_text()) if receipt.exists() else None,
        }
    Path(f"{name}.result.json").write_text(json.dumps(result), encoding="utf-8")


def names_changed_by_importing_the_bridge() -> None:
    before = dict(names_of("axolotl", "peft", "transformers", "trl"))
    importlib.import_module("veomni_bridges.axolotl")
    changed = differences(before, dict(names_of("axolotl", "peft", "transformers", "trl")))
    Path("changed.result.json").write_text(json.dumps(changed), encoding="utf-8")


def main() -> None:
    fork = multiprocessing.get_context("fork")
    jobs = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    processes = [fork.Process(target=names_changed_by_importing_the_bridge)]
    processes += [fork.Process(target=train, args=item) for item in jobs.items()]
    for process in processes:
        process.start()
        process.join()
        assert process.exitcode == 0


if __name__ == "__main__":
    main()
