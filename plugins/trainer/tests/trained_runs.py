"""A tiny job that has been trained once, for tests of what is made of its folder afterwards."""

from __future__ import annotations

import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml
from tiny_configs import LLAMA

from veomni_trainer.job.load import load_job
from veomni_trainer.run.run_job import run_job

STEPS = 6
TEXT = "the quick brown fox jumps over the lazy dog; " * 60


class TrainedRun:
    """A job and its folder, with checkpoints after steps 2, 4 and 6. Cheap to copy."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / "run"
        self.job = root / "job.yaml"

    @classmethod
    def train(cls, root: Path) -> TrainedRun:
        """Write the job into ``root``, and train it."""
        made = cls(root)
        (root / "text.txt").write_text(TEXT, encoding="utf-8")
        made.job.write_text(yaml.safe_dump(job_of(made.folder)), encoding="utf-8")
        made.go()
        return made

    def copied(self, root: Path) -> TrainedRun:
        """The same in another folder."""
        shutil.copytree(self.root, root, dirs_exist_ok=True)
        made = TrainedRun(root)
        made.job.write_text(yaml.safe_dump(job_of(made.folder)), encoding="utf-8")
        return made

    def checkpoint(self, step: int) -> Path:
        """The checkpoint of ``step``."""
        return self.folder / f"checkpoint-{step}"

    def go(self, *changes: str, **options: Any) -> bool:
        """Run the job in this process."""
        return run_job(load_job(self.job, changes), **options)

    def files(self) -> dict[str, bytes]:
        """All that is in the root, by path."""
        return {str(p.relative_to(self.root)): p.read_bytes() for p in sorted(self.root.rglob("*")) if p.is_file()}


def job_of(output_dir: Path) -> dict[str, Any]:
    """The job as data."""
    return {
        "model": {"config": deepcopy(LLAMA), "dtype": "float32", "ops_implementation": {"preset": "eager"}},
        "data": {"files": "text.txt", "sequence_length": 32},
        "train": {
            "output_dir": str(output_dir),
            "steps": STEPS,
            "batch_size": 2,
            "learning_rate": 1e-3,
            "device": "cpu",
            "save_every": 2,
            "keep_checkpoints": 9,
        },
    }
