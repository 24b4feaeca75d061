"""Trains the same job all-eager, in a separate process."""

from __future__ import annotations

import json
import subprocess
import sys

from veomni_trainer.loop.signals import receiving
from veomni_trainer.output.folder import RunFolder

_ALL_EAGER = "{preset: eager}"
_STANDARD_ERROR = 2  # its file descriptor


def train_eager(folder: RunFolder, accept_plan_change: bool) -> int:
    """Run ``folder``'s job with everything eager into ``folder/eager``; returns the process's exit code.

    In a separate process, the allocator, the peak memory and the compiled code of this run don't affect the eager one.
    An eager run that was interrupted before is resumed.
    """
    eager = folder.compared("eager")
    command = [sys.executable, "-m", "veomni_core.cli", "train", str(folder.job)]
    command += ["--set", f"model.ops_implementation={_ALL_EAGER}"]
    command += ["--set", f"train.output_dir={json.dumps(str(eager.path))}"]
    command += ["--resume"] if eager.checkpoints() else ["--overwrite"]
    command += ["--accept-plan-change"] if accept_plan_change else []
    # Where this process prints to standard error (under --json), so does the child.
    output = _STANDARD_ERROR if sys.stdout is sys.stderr else None
    # In its own process group, the child doesn't get the terminal's Ctrl-C. This process forwards each signal, once.
    child = subprocess.Popen(command, process_group=0, stdout=output)
    with receiving(lambda number, _: child.send_signal(number)):
        return child.wait()
