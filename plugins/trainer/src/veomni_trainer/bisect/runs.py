"""Trains a job's first steps with kernels at some of its sites, and compares such runs."""

from __future__ import annotations

import gc
import io
import json
import math
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState

from veomni_core import KernelSpec, Plan, discover
from veomni_trainer.job.load import load_job
from veomni_trainer.job.schema import Job
from veomni_trainer.loop.trainer import JobTrainer
from veomni_trainer.output.folder import RunFolder
from veomni_trainer.output.metrics import Row, training_rows
from veomni_trainer.report.comparison import ROUNDING
from veomni_trainer.run.checkpoints import StartingPoint
from veomni_trainer.run.start import prepare
from veomni_trainer.setup.conditions import conditions, for_this_machine

# Gradients round more than the loss, which is a mean of many values. Kernels of tiny Llama, Qwen3-MoE, Gemma 3 and
# DeepSeek-V3 models change a parameter's norm by up to 3e-7 in float32 and by up to 6e-3 in bfloat16.
_NORM_TO_LOSS = 4.0
# A gradient that is a smaller part of all of them is compared with this part: it may be nothing but rounding.
_SMALLEST_PART = 1e-3
# What a run that is kept for no one leaves out.
_QUIET = (
    "train.save_every=never",
    "train.export=false",
    "train.report_to=[]",
    "train.shadow=0",
    "train.verify=false",
    "train.cuda_graphs=false",  # its kernels are the same without
    "train.log_every=1",
)
_SETTINGS = ("on_change", "training_logits")  # keys of ops_implementation that choose no kernel


@dataclass(frozen=True)
class KernelSite:
    """A bound site: the field that chose its kernel, the kernel, and the module's path."""

    field: str
    spec: KernelSpec
    path: str

    def __str__(self) -> str:
        return f"{self.spec} at {self.path or 'the model'}"


@dataclass(frozen=True)
class Difference:
    """Where one run leaves another by more than rounding.

    Attributes:
        step: the first such step.
        what: what differs most in it: the loss, the norm of all gradients, or in the first step that of a parameter's.
        relative: by how much, relative to the other run's value.
    """

    step: int
    what: str
    relative: float

    def __str__(self) -> str:
        return f"differs at step {self.step}, {self.what} by {self.relative:.1e}"


_Value = tuple[int, str, float, float]  # step, name, value, and how large a value at least is taken for


def _values(rows: list[Row], norms: dict[str, float]) -> Iterator[_Value]:
    """What is compared of a run: its rows, and the norm of each parameter's gradient in the first step.

    Only there are the weights of two runs equal: after it, AdamW turns rounding into updates of full size.
    """
    whole = math.hypot(*norms.values())
    for row in rows:
        yield row["step"], "the loss", row["loss"], 0.0
        if row is rows[0]:
            for name, norm in norms.items():
                yield row["step"], f"the gradient of {name}", norm, _SMALLEST_PART * whole
        if "grad_norm" in row:
            yield row["step"], "the norm of the gradients", row["grad_norm"], 0.0


class Runs:
    """The runs of one job's first steps. Each starts from the job's own weights, seed and data.

    Args:
        job: the job's file.
        changes: the values of ``--set``.
        steps: how many steps each run takes.
        tolerance: the relative difference of losses that is rounding; by default that of the dtype in which the job
            computes. Norms of gradients may differ by four times as much.

    Attributes:
        sites: where the job has kernels, in the order of the model's modules, op by op.

    Raises:
        VeOmniError: what training the job would raise.
    """

    def __init__(self, job: Path, changes: Sequence[str], steps: int, tolerance: float | None = None) -> None:
        self._path, self._changes, self._steps = job, (*changes, *_QUIET), steps
        self._registry = discover()
        loaded = for_this_machine(load_job(job, self._changes), self._registry)
        written = loaded.model.ops_implementation or {}
        self._settings = {name: written[name] for name in _SETTINGS if name in written}
        under = conditions(loaded)
        self.tolerance = tolerance or ROUNDING.get(str(under.autocast or under.dtype), ROUNDING["float32"])
        self._whole, plan = self._train(loaded)
        self.sites = tuple(
            KernelSite(op.config_field, decision.spec, decision.site.path)
            for op in plan.ops
            for decision in op.sites
            if decision.spec is not None
        )
        self._eager, _ = self._train(self._with_kernels_at(()))

    def difference(self, sites: Collection[KernelSite] | None = None) -> Difference | None:
        """Where a run with kernels at ``sites`` alone leaves the all-eager run; ``None`` if it doesn't.

        Without ``sites`` it is the job's own run.
        """
        found = self._whole if sites is None else self._train(self._with_kernels_at(sites))[0]
        differences = []
        for (step, what, value, _), (*_, wanted, least) in zip(found, self._eager, strict=True):
            relative = abs(value - wanted) / max(abs(wanted), least, 1e-12)
            if not relative <= self.tolerance * (1.0 if what == "the loss" else _NORM_TO_LOSS):  # NaN too
                differences.append(Difference(step, what, relative))
        first = [each for each in differences if each.step == differences[0].step]
        return max(first, key=lambda each: (math.isnan(each.relative), each.relative), default=None)

    def _with_kernels_at(self, sites: Collection[KernelSite]) -> Job:
        """The job with its kernels at ``sites``, and everything else eager."""
        fields: dict[str, Any] = {"preset": "eager", **self._settings}
        for site in sites:
            name: Any = site.spec.name
            value = {"kernel": name, "options": dict(site.spec.settings)} if site.spec.settings else name
            fields.setdefault(site.field, {})[site.path] = value
        change = f"model.ops_implementation={json.dumps(fields)}"
        return for_this_machine(load_job(self._path, (*self._changes, change)), self._registry)

    def _train(self, job: Job) -> tuple[list[_Value], Plan]:
        """What is compared of the job's first steps, and its plan."""
        rows: list[Row] = []
        # Each run would print the job's receipt.
        with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
            start = prepare(job, RunFolder(Path(folder)), StartingPoint(), False, registry=self._registry)
            norms, stop, plan = _FirstGradients(), _StopAfter(self._steps), start.binding.plan
            JobTrainer(start.model, start.arguments, start.corpus, rows.append, [norms, stop], job.train).train()
        del start
        if torch.accelerator.is_available():
            gc.collect()  # before the next run's model is there too
            torch.accelerator.empty_cache()
        return [*_values(training_rows(rows), norms.by_name)], plan


class _FirstGradients(TrainerCallback):
    """Takes the norm of each parameter's gradient in the first step."""

    def __init__(self) -> None:
        self.by_name: dict[str, float] = {}

    def on_pre_optimizer_step(self, args: Any, state: TrainerState, control: Any, model: Any = None, **_: Any) -> None:
        if not self.by_name:
            gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            norms = torch.stack([gradient.float().norm() for gradient in gradients.values()]).tolist()
            self.by_name = dict(zip(gradients, norms, strict=True))


class _StopAfter(TrainerCallback):
    """Ends training after so many steps, under the schedule of the whole job."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> TrainerControl:
        control.should_log = True
        control.should_save = control.should_evaluate = False
        control.should_training_stop = control.should_training_stop or state.global_step >= self._steps
        return control
