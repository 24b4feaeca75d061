"""Runs several jobs, one after the other, in the same processes.

What a job raises is printed by each rank as one line of JSON; the next job runs nevertheless.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from torch import distributed
from transformers import AutoModelForCausalLM

from veomni_core import build_foundation_model
from veomni_core.errors import VeOmniError
from veomni_trainer.job.load import load_job
from veomni_trainer.run import run_job


@dataclass
class Case:
    """A job with changes and ``run_job``'s options; or the sizes under which ``weights`` are loaded and compared.

    ``continues``: the checkpoint of another run that is copied into this run's folder before it is resumed.
    """

    job: str = ""
    changes: list[str] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    continues: str = ""
    weights: str = ""
    plain: str = ""
    sizes: dict[str, int] = field(default_factory=dict)

    def run(self) -> None:
        if self.weights:
            self._compare()
            return
        job = load_job(Path(self.job), self.changes)
        if self.continues:
            if distributed.get_rank() == 0:
                checkpoint = Path(self.continues)
                shutil.copytree(checkpoint, Path(job.train.output_dir) / checkpoint.name, dirs_exist_ok=True)
                for name in ("metrics.jsonl", "job.yaml"):
                    shutil.copy(checkpoint.parent / name, job.train.output_dir)
            distributed.barrier()
        run_job.run_job(job, **self.options)

    def _compare(self) -> None:
        """Each rank loads its shards; together they must be the plain weights, bit for bit."""
        model = build_foundation_model(
            self.weights,
            self.weights,
            ops_implementation={"preset": "eager"},
            torch_dtype="float32",
            init_device="cpu",
            device="cpu",
            distributed_config=self.sizes,
        )
        plain = AutoModelForCausalLM.from_pretrained(self.plain).state_dict()
        for name, parameter in model.named_parameters():
            whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            assert torch.equal(whole, plain.pop(name)), name
        assert not plain


def run_cases(cases: list[Case]) -> None:
    """Run them on this rank, one after the other."""
    destroy, run_job._let_go = run_job._let_go, lambda: None  # the process group lives on to the next job
    for number, case in enumerate(cases):
        try:
            case.run()
        except VeOmniError as error:
            print(json.dumps({"case": number, "error": type(error).__name__, "message": str(error)}))
        AcceleratorState._reset_state()
    destroy()
