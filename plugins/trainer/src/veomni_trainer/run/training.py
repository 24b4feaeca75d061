"""Trains from a start to the job's last step, to an interrupt, or to a step after which it can't go on."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from accelerate.utils import reduce
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from veomni_core import Shadow
from veomni_core.errors import BindingError, HostError
from veomni_trainer.loop.classify_trainer import ClassifyTrainer
from veomni_trainer.loop.early_ends import EarlyStop
from veomni_trainer.loop.expert_loads import ExpertLoads
from veomni_trainer.loop.measures import Throughput, peak_of
from veomni_trainer.loop.profiled_steps import ProfiledSteps
from veomni_trainer.loop.trainer import JobTrainer
from veomni_trainer.output.disk import checkpoint_bytes, describe_disk_space, free_bytes, write_failure
from veomni_trainer.run.checkpoints import CheckpointCallback
from veomni_trainer.run.eager import AlternatingSteps
from veomni_trainer.run.record import RunRecord
from veomni_trainer.run.start import Start
from veomni_trainer.run.terminal import is_main_process, print_once, receiving
from veomni_trainer.setup.conditions import precision_of, weights_dtype
from veomni_trainer.setup.model import unbound_skeleton
from veomni_transformers.losses.counted_items import divides_by_items

_NORMS = ("rms_norm", "rms_norm_gated")


@dataclass(frozen=True)
class Ending:
    """How a training ended.

    Attributes:
        interrupted: whether an interrupt ended it before its last step.
        bad_step: the step whose loss or gradient norm is not finite, and which of them, if it ended with such a step.
    """

    interrupted: bool = False
    bad_step: str = ""


class InterruptCallback(TrainerCallback):
    """Stops training at the end of the step in which a signal arrives; a second signal stops it immediately."""

    def __init__(self) -> None:
        self.requested = self.interrupted = False

    def request(self) -> None:
        """End training after the step that runs, as a signal does."""
        self.requested = True

    def on_step_end(self, args: TrainingArguments, state: Any, control: TrainerControl, **_: Any) -> None:
        requested: Any = self.requested
        if args.world_size > 1:  # all processes stop after the same step, whichever of them has received a signal
            requested = reduce(torch.tensor(int(requested), device=args.device), "sum")
        if requested and not control.should_training_stop:
            self.interrupted = True
            control.should_save = True
            control.should_training_stop = True

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        if is_main_process():  # not by print, which may be what was interrupted
            os.write(2, b"\nInterrupted: ends after this step, with a checkpoint. Again: stops at once, without one.\n")


class ShadowedSteps(TrainerCallback):
    """Ends training on all processes where a kernel and its module's own code differ, before the weights change.

    Args:
        model: the model that the kernels are bound in.
        steps: in how many steps it looks, counted from the first one of this run.
        loads: what counts the experts' rows; what runs beside the training is left out.
    """

    def __init__(self, model: nn.Module, steps: int, loads: ExpertLoads | None) -> None:
        self._model, self._left, self._loads = model, steps, loads
        self._shadow: Shadow | None = None

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._shadow = shadow = Shadow(self._model)
        if self._loads is not None:
            self._loads.is_paused = lambda: shadow.replaying

    def on_pre_optimizer_step(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        if self._shadow is not None:
            self._shadow.raise_if_breached(f"step {state.global_step + 1}")
            if not self._shadow.compared:
                raise BindingError(f"train.shadow compared nothing:\n{self._shadow.describe()}")

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        if self._shadow is None:
            return
        self._left -= 1
        if not self._left or control.should_training_stop:
            self._shadow.end()
            print_once(f"equal to their own code until step {state.global_step}: {self._shadow.describe()}")
            self._shadow = None

    def on_train_end(self, *_: Any, **__: Any) -> None:
        if self._shadow is not None:
            self._shadow.end()


def fit(start: Start, compared: bool = False, turns: AlternatingSteps | None = None) -> Ending:
    """Train until the job's last step, an interrupt, or a step that the job doesn't go on after.

    Args:
        start: what training starts from.
        compared: whether the run is one of a comparison: then the routers' choices are counted.
        turns: the turns that it takes with the other run of a comparison.

    Raises:
        HostError: the disk isn't enough.
        ConformanceError: in a step of ``train.shadow`` a site's kernel and its own code differ, on some process.
    """
    train, folder, point = start.job.train, start.folder, start.point
    counts = train.measures_loads or (compared and _can_count(start))
    loads = ExpertLoads(start.base, start.binding, train, start.arguments.process_index) if counts else None
    record, interrupt = RunRecord(start), InterruptCallback()
    if is_main_process():
        shutil.rmtree(folder.staging, ignore_errors=True)
    try:
        early = [EarlyStop(train)] if train.early_stop else []
        beside: list[Any] = [ShadowedSteps(start.base, train.shadow, loads)] if train.shadow else []
        if train.profile:
            marked = None if train.torch_compile or train.cuda_graphs else start.base
            beside.append(ProfiledSteps(marked, train.profile, folder.profile, print_once))
        callbacks = [*beside, record, interrupt, *early, CheckpointCallback(start), *([turns] if turns else [])]
        trainer = trainer_of(start, record.on_row, callbacks, loads)
        if turns:
            turns.on_wait = trainer.clock.leave_out
            if not turns.first:  # without the run that it is compared with, there is nothing left to do
                turns.on_lost = interrupt.request
        with (
            record.progress.running(),
            receiving(interrupt.receive),
            _kernels_in_fused_heads(start),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore", FutureWarning)  # of TRL's calls of transformers
            # PEFT's, of a base that is named by its Hub id; words that were added are trained and saved whole.
            warnings.filterwarnings("ignore", "Could not find a config file in")
            trainer.train(resume_from_checkpoint=str(point.checkpoint) if point.checkpoint else None)
        record.close()
    except BaseException as error:
        record.end_with(error)
        if not (why := write_failure(error)):
            raise
        what = next((each.name for each in folder.staging.glob("checkpoint-*")), "metrics.jsonl or report.html")
        shutil.rmtree(folder.staging, ignore_errors=True)  # before free bytes are counted
        raise HostError(_explain(what, why, start)) from error
    finally:
        if is_main_process():
            shutil.rmtree(folder.staging, ignore_errors=True)
    bad = trainer.bad_steps
    return Ending(interrupt.interrupted, f"step {trainer.state.global_step}: {bad.problem}" if bad.problem else "")


def trainer_of(start: Start, on_row: Any, callbacks: list[Any], loads: ExpertLoads | None) -> JobTrainer:
    train = start.job.train
    ops = (op for op in start.binding.plan.ops if op.op_name in _NORMS)
    norms = [start.base.get_submodule(each.site.path) for op in ops for each in op.sites if each.site.variant]
    peak = peak_of(start.arguments.device, precision_of(start.job).autocast or weights_dtype(start.job))
    counted = peak is not None and train.method in ("pretrain", "sft", "classify") and train.ep_size == 1
    whole = Throughput(start.base, peak or 0.0, start.arguments.world_size, start.job.data.packing) if counted else None
    given = start.model, start.arguments, start.corpus, on_row, callbacks, train, loads, norms, whole
    if start.inputs is None:
        trainer = JobTrainer(*given)
        divides = divides_by_items(unbound_skeleton(start.job, start.base.config))
        if divides is not None:  # else what transformers believes of it
            trainer.model_accepts_loss_kwargs = divides
        return trainer
    if train.method == "classify":
        return ClassifyTrainer(*given, start.inputs)
    from veomni_trainer.loop.trl_trainers import trainer_class

    return trainer_class(train.method)(*given, start.inputs)


@contextmanager
def _kernels_in_fused_heads(start: Start) -> Iterator[None]:
    """While TRL's trainer trains, its fused head runs the kernel that the plan has for log-probabilities.

    Raises:
        ConformanceError: the kernel does not compute what TRL's own function computes.
    """
    if not start.job.train.takes_logprobs:
        yield
        return
    from veomni_bridges.trl_heads import FusedHeads

    heads = FusedHeads(start.binding)
    if heads.kernels:
        print_once(f"{heads.name}: {heads.describe()}")
    try:
        yield
    finally:
        if heads.active:
            heads.undo()


def _can_count(start: Start) -> bool:
    """Whether the model has experts, whose rows can be counted, and the job doesn't say otherwise.

    Hooks count, which neither a compiled model nor a graph calls.
    """
    train, sites = start.job.train, (op.sites for op in start.binding.plan.ops if op.op_name == "moe_experts")
    return any(sites) and train.expert_loads is None and not (train.torch_compile or train.cuda_graphs)


def _explain(what: str, why: str, start: Start) -> str:
    folder, saved = start.folder.path, start.folder.checkpoints()
    room = describe_disk_space(folder, checkpoint_bytes(start.model), free_bytes(folder))
    then = f"go on from {saved[-1][1].name}, which is whole, with --resume" if saved else "start again with --overwrite"
    return f"{folder / what} can't be written: {why}. For comparison, {room}. Free some, and {then}"
