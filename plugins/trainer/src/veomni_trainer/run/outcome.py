"""What a run has come to, as plain data: for programs that start `veomni train --json`."""

from __future__ import annotations

import json
from typing import Any

from veomni_trainer.output.folder import RunFolder


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
