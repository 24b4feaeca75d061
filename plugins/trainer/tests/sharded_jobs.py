"""Runs several jobs, one after the other, in the same processes: importing everything costs more than a tiny job.

Under torchrun with a JSON file of ``{"job": PATH, "set": [...], "options": {...}}``. What a job raises is printed by
each rank as one line of JSON; the next job runs nevertheless.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from accelerate.state import AcceleratorState

from veomni_core.errors import VeOmniError
from veomni_trainer.job.load import load_job
from veomni_trainer.run import run_job


def main(jobs: Path) -> None:
    torch.set_num_threads(1)
    destroy, run_job._let_go = run_job._let_go, lambda: None  # the process group lives on to the next job
    for number, each in enumerate(json.loads(jobs.read_text(encoding="utf-8"))):
        try:
            run_job.run_job(load_job(Path(each["job"]), each.get("set", ())), **each.get("options", {}))
        except VeOmniError as error:
            print(json.dumps({"job": number, "error": type(error).__name__, "message": str(error)}), flush=True)
        AcceleratorState._reset_state()
    destroy()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
