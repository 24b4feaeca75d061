"""Writes a run's files during training. Earlier results stay untouched until the first step is done."""

from __future__ import annotations

import json
from typing import Any

from transformers import TrainerCallback, TrainerState

from veomni_core.binding.bind import Binding
from veomni_trainer.output.files import write_whole
from veomni_trainer.output.folder import RunFolder
from veomni_trainer.output.metrics import Row, append_metrics, truncate_metrics
from veomni_trainer.report.progress import Progress


class RunRecord(TrainerCallback):
    """Writes the run's files and shows its progress; of several processes, only the first one does."""

    def __init__(
        self,
        folder: RunFolder,
        binding: Binding,
        job_text: str,
        read: list[dict[str, Any]],
        resumed_from: int,
        progress: Progress,
    ) -> None:
        self._folder, self._binding, self._job_text, self._read = folder, binding, job_text, read
        self._resumed_from, self._progress = resumed_from, progress
        self._begun = False

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        if state.is_world_process_zero and not self._begun:
            self._begin()
            self._begun = True

    def on_row(self, row: Row) -> None:
        """Append one row to the metrics, and show it. The rows of each expert are too many for it: they go beside."""
        if (rows := row.pop("expert_rows", None)) is not None:
            append_metrics(self._folder.expert_rows, {"step": row["step"], "rows": rows})
        append_metrics(self._folder.metrics, row)
        self._progress.show(row)

    def _begin(self) -> None:
        self._folder.path.mkdir(parents=True, exist_ok=True)
        if self._resumed_from:
            for metrics in (self._folder.metrics, self._folder.expert_rows):
                truncate_metrics(metrics, self._resumed_from)
            self._folder.report.unlink(missing_ok=True)
        else:
            self._folder.clear()
        write_whole(self._folder.plan, self._binding.plan.to_json())
        write_whole(self._folder.receipt, self._binding.receipt.to_json())
        write_whole(self._folder.data, json.dumps(self._read, indent=1))
        write_whole(self._folder.job, self._job_text)
