"""``veomni train --dry-run``: what the job would do and need. Loads no weights, starts no processes, writes nothing."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from veomni_core import Plan, discover, make_plan
from veomni_core.commands import FrozenJob, render_table
from veomni_core.errors import ConfigError
from veomni_trainer.data.corpus import Corpus
from veomni_trainer.job.schema import Job
from veomni_trainer.output.folder import RunFolder, locked
from veomni_trainer.run.check import settled_job
from veomni_trainer.run.checkpoints import StartingPoint, check_plan, completion, describe_resumption, starting_point
from veomni_trainer.run.start import checked_data, steps_of
from veomni_trainer.setup.arguments import device_of
from veomni_trainer.setup.conditions import conditions, ops_config
from veomni_trainer.setup.memory_estimate import MemoryEstimate, estimate_memory
from veomni_trainer.setup.method_models import has_new_head, with_labels
from veomni_trainer.setup.model import model_config, unbound_skeleton
from veomni_transformers.build import check_fit
from veomni_transformers.jobs.hub_snapshots import is_offline

_PARTS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer's states",
    "activations": "activations that the layers keep for the backward",
    "logits": "what the head and the loss keep",
    "brief": "what the loss and the backward allocate for a moment",
}


@dataclass(frozen=True)
class DryRun:
    """What a job would do.

    Attributes:
        resumption: of a job that goes on: from where, and what has changed since; otherwise empty.
        memory: ``None`` where one micro-batch of the first layers is too large for the device.
        device_bytes: the memory of the device, or of this machine for a CPU.
    """

    job: Job
    point: StartingPoint
    resumption: str
    corpus: Corpus
    plan: Plan
    parameters: int
    processes: int
    device: torch.device
    memory: MemoryEstimate | None
    device_bytes: int

    @property
    def steps(self) -> int:
        """Optimizer steps."""
        return steps_of(self.corpus, self.job.train, self.processes)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step, over all processes."""
        train = self.job.train
        sequences = train.batch_size * train.gradient_accumulation * self.processes // train.ranks_per_batch
        return sequences * self.job.data.sequence_length

    @property
    def epochs(self) -> float | None:
        """How often the whole job sees each training sequence, on average; ``None`` of a stream."""
        sequences, length = self.corpus.sequences, self.job.data.sequence_length
        return self.steps * self.tokens_per_step / (sequences * length) if sequences else None

    def describe(self) -> str:
        """The text for the terminal."""
        train = self.job.train
        processes = f", {self.processes} processes" if self.processes > 1 else ""
        epochs = f", {self.epochs:.2g} epochs" if self.epochs else ""
        lines = [
            self.corpus.describe(),
            f"model: {self.parameters / 1e6:,.1f} M parameters, on {self.device}{processes}",
            self.plan.table(),
            *([self.resumption] if self.resumption else ()),
            f"train: starts from step {self.point.step:,}; {self.steps:,} steps of "
            f"{self.tokens_per_step:,} tokens{epochs}; writes to {train.output_dir}",
            self._memory_table(),
            "Nothing was written but tokens to data.cache. Leave out --dry-run to train.",
        ]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        return {
            "steps": self.steps,
            "resumes": str(self.point.checkpoint) if self.point.checkpoint else None,
            "tokens_per_step": self.tokens_per_step,
            "epochs": self.epochs,
            "parameters": self.parameters,
            "processes": self.processes,
            "device": str(self.device),
            "device_bytes": self.device_bytes,
            "memory": self.memory.to_dict() if self.memory else None,
            "plan_sha256": self.plan.sha256,
        }

    def _memory_table(self) -> str:
        if self.memory is None:
            return (
                f"memory: one micro-batch of the first layers does not fit on {self.device} "
                f"({_size(self.device_bytes)}). Lower train.batch_size or data.sequence_length"
            )
        parts = self.memory.to_dict()
        rows = [(what, _size(parts[key])) for key, what in _PARTS.items() if parts[key]]
        rows.append(("peak: not all of it at a time", _size(self.memory.total)))
        towers = ", and none of towers" if self.corpus.processor else ""
        title = f"Memory of each process; activations measured on {self.memory.measured_layers} layer(s){towers}"
        lines = [render_table(("part", "estimate"), rows, title)]
        if self.memory.total > self.device_bytes:
            lines.append(
                f"That is more than {self.device} has ({_size(self.device_bytes)}). Lower train.batch_size (and "
                "raise gradient_accumulation), set train.gradient_checkpointing: true, or shard the model"
            )
        return "\n".join(lines)


def dry_run(
    job: Job,
    *,
    resume: bool | Path = False,
    overwrite: bool = False,
    accept_plan_change: bool = False,
    frozen: FrozenJob | None = None,
) -> DryRun:
    """Do everything that ``veomni train`` does before it loads weights, and estimate the memory.

    Raises:
        ConfigError: torchrun started this process.
        VeOmniError: what training would raise.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("--dry-run looks at one process of the job; start it without torchrun")
    transformers.utils.logging.set_verbosity_error()
    registry, folder = discover(), RunFolder(Path(job.train.output_dir))
    job = settled_job(job, registry, folder.job if resume else None)
    ops = ops_config(job, registry)
    with locked(folder.path):  # for a moment: whether it can be written is known by trying
        point = starting_point(job, folder, resume, overwrite)
    processes = max(job.train.fsdp_size * job.train.tp_size, job.train.ranks_per_sequence)
    tokenizer, corpus, _ = checked_data(job, point, processes)
    done = completion(job, folder, point, steps_of(corpus, job.train, processes))
    offline = is_offline()
    located = job.model.located(with_weights=offline)
    device, under = device_of(job.train), conditions(job)
    job = with_labels(job, corpus)
    here = located.weights and (offline or located.weights == job.model.weights)  # others are downloaded to train
    if located.weights and here and (job.lora or not point.checkpoint):
        check_fit(
            model_config(job, tokenizer),
            Path(located.weights),
            trust_remote_code=job.model.trust_remote_code,
            modeling=job.model.modeling,
            resize_embeddings=job.model.resize_embeddings,
            new_head=has_new_head(job),
        )
    skeleton = unbound_skeleton(job, model_config(job, tokenizer))
    plan = make_plan(
        skeleton,
        ops,
        hardware=ops.registry.detect_hardware(under.device),
        autocast=under.autocast,
        distributed_config=under.distributed_config,
    )
    if frozen:
        frozen.check(plan)
    resumption = ""
    if point.checkpoint:
        check_plan(point.checkpoint, plan, accept_plan_change)
        resumption = done or describe_resumption(job, folder, point)
    try:
        memory = estimate_memory(job, ops, skeleton, device)
    except torch.OutOfMemoryError:
        memory = None
    parameters = sum(parameter.numel() for parameter in skeleton.parameters())
    return DryRun(job, point, resumption, corpus, plan, parameters, processes, device, memory, _memory_of(device))


def _size(count: int) -> str:
    return f"{count / 1e9:,.2f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"


def _memory_of(device: torch.device) -> int:
    if device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(torch.get_device_module(device).mem_get_info(device)[1])
