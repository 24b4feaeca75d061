"""A run's output folder: what lies where, whether it is taken, and which checkpoints in it are complete."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from veomni_core.errors import CheckpointError, ConfigError

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


@dataclass(frozen=True)
class RunFolder:
    """Nothing in here is written before a run's first step is done, so a start that fails leaves it as it was."""

    path: Path

    @property
    def metrics(self) -> Path:
        """One JSON object per logged step."""
        return self.path / "metrics.jsonl"

    @property
    def plan(self) -> Path:
        """The plan under which the run trains."""
        return self.path / "plan.json"

    @property
    def receipt(self) -> Path:
        """What was bound."""
        return self.path / "receipt.json"

    @property
    def job(self) -> Path:
        """The job, complete with defaults and ``--set``."""
        return self.path / "job.yaml"

    @property
    def summary(self) -> Path:
        """The run in a few numbers, and the comparison."""
        return self.path / "summary.json"

    @property
    def report(self) -> Path:
        """The page to look at."""
        return self.path / "report.html"

    @property
    def staging(self) -> Path:
        """Where checkpoints are written before they are moved to their place."""
        return self.path / ".incomplete"

    def compared(self, name: str) -> RunFolder:
        """The folder of the run that this one is compared with."""
        return RunFolder(self.path / name)

    def checkpoints(self) -> list[tuple[int, Path]]:
        """The complete checkpoints, oldest first."""
        found = [(int(match[1]), p) for p in self.path.glob("checkpoint-*") if (match := _CHECKPOINT.fullmatch(p.name))]
        return sorted((step, path) for step, path in found if _is_complete(path))

    def check_free(self) -> None:
        """Refuse to start a new run over another one's results.

        Raises:
            ConfigError: a run is here, or ``path`` isn't a folder.
        """
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"train.output_dir: {self.path} is a file; name a folder")
        if any(path.exists() for path in self._results()):
            can_resume = "continue it with --resume, " if self.checkpoints() else ""
            raise ConfigError(
                f"train.output_dir: {self.path} holds an earlier run. Choose another folder, {can_resume}or replace it "
                "with --overwrite"
            )

    def last_checkpoint(self) -> tuple[int, Path]:
        """The newest complete checkpoint.

        Raises:
            CheckpointError: there is none.
        """
        if not self.checkpoints():
            raise CheckpointError(
                f"--resume: there is nothing to resume in {self.path}: it holds no complete checkpoint. "
                "Start without --resume"
            )
        return self.checkpoints()[-1]

    def clear(self) -> None:
        """Remove an earlier run's results, and nothing else that may lie here."""
        for path in self._results():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def drop_checkpoints(self, keep: int) -> None:
        """Keep the newest ``keep`` checkpoints only."""
        for _, path in self.checkpoints()[:-keep]:
            shutil.rmtree(path)

    def _results(self) -> list[Path]:
        files = [self.metrics, self.plan, self.receipt, self.job, self.summary, self.report]
        folders = [p for p in self.path.glob("checkpoint-*") if _CHECKPOINT.fullmatch(p.name)]
        eager = self.compared("eager")
        return [*files, *folders, *([eager.path] if eager.metrics.exists() else [])]


def _is_complete(checkpoint: Path) -> bool:
    return all((checkpoint / name).is_file() for name in ("trainer_state.json", "plan.json"))
