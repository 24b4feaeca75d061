"""The process of the all-eager run, which ``run.eager`` starts."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

from veomni_core.commands import exit_code
from veomni_core.errors import VeOmniError
from veomni_trainer.job.load import load_job
from veomni_trainer.run.terminal import INTERRUPTED
from veomni_trainer.setup.postponed import postpone_bitsandbytes

_CHANGES = (
    *("model.ops_implementation={preset: eager}", "train.export=false", "train.report_to=[]", "train.shadow=0"),
    "train.cuda_graphs=false",  # models' own code may wait for the GPU
)


def main(arguments: str) -> int:
    """Run the job; returns the exit code."""
    with contextlib.suppress(VeOmniError):  # said below, once the other process can be told that this one ends
        postpone_bitsandbytes(load_job(Path(json.loads(arguments)["job"])))

    from veomni_trainer.run.eager import AlternatingSteps, EagerRun
    from veomni_trainer.run.run_job import run_job

    run = EagerRun(**json.loads(arguments))
    turns = AlternatingSteps(*run.turns, first=False) if run.turns else None
    try:
        job = load_job(Path(run.job), [*_CHANGES, f"train.output_dir={json.dumps(run.folder)}"])
        interrupted = run_job(
            job,
            resume=run.resume,
            overwrite=not run.resume,
            accept_plan_change=run.accept_plan_change,
            compared=True,
            turns=turns,
        )
    except VeOmniError as error:
        print(f"error: the eager run: {error} [{type(error).__name__}]", file=sys.stderr)
        return exit_code(error)
    finally:
        if turns:
            turns.end()
    return INTERRUPTED if interrupted else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
