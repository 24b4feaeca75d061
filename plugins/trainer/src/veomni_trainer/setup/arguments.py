"""Turns a job's ``train`` section into transformers' ``TrainingArguments``, which also initialise torch.distributed."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, TrainingArguments
from transformers.utils.import_utils import is_torch_bf16_gpu_available

from veomni_core import Plan
from veomni_core.errors import HostError
from veomni_trainer.job.precision import PrecisionName
from veomni_trainer.job.train_section import TrainSection

# Every rank builds and binds its own copy, which is then sharded in place.
_FSDP = {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "cpu_ram_efficient_loading": False}


def training_arguments(
    train: TrainSection, staging: Path, kind: type = TrainingArguments, **more: Any
) -> TrainingArguments:
    """The arguments. Under torchrun this also joins the process group, so that ranks can compare their plans.

    Args:
        train: the job's section.
        staging: the folder that they name for output.
        kind: their class, which may be one of TRL's.
        more: arguments that are that class's own.

    Raises:
        HostError: the requested device is not available, or the precision or FSDP can't run on it.
    """
    on_cpu = device_of(train).type == "cpu"
    if train.is_sharded and on_cpu and torch.accelerator.is_available():
        raise HostError(
            "train.device is cpu, but transformers shards models over this machine's accelerators. Write train.device: "
            "auto, or hide them (CUDA_VISIBLE_DEVICES=)"
        )
    is_distributed = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if train.fsdp and not is_distributed:
        raise HostError(
            "train.fsdp shards the model over processes, but this job has only one. Start it as "
            "`torchrun --nproc_per_node=N -m veomni_core.cli train JOB.yaml`, or write train.fsdp: false"
        )
    if train.fsdp and on_cpu:
        raise HostError(
            "train.fsdp needs accelerators: on CPUs accelerate would replicate the model on every process instead of "
            "sharding it, without a warning. Write train.fsdp: false"
        )
    if train.cuda_graphs and is_distributed:
        raise HostError("train.cuda_graphs is for one process, and this job has several; write cuda_graphs: false")
    if train.cuda_graphs and (device_of(train).type != "cuda" or torch.version.hip):
        raise HostError("train.cuda_graphs needs an NVIDIA GPU, and there is none here; write cuda_graphs: false")
    check_precision(train.precision, on_cpu)
    arguments: TrainingArguments = kind(
        output_dir=str(staging),
        max_steps=train.steps or -1,
        num_train_epochs=train.epochs or 1.0,
        per_device_train_batch_size=train.batch_size,
        per_device_eval_batch_size=train.batch_size,
        gradient_accumulation_steps=train.gradient_accumulation,
        learning_rate=train.learning_rate,
        lr_scheduler_type=train.scheduler_type,
        lr_scheduler_kwargs=train.schedule_options,
        warmup_steps=train.warmup,
        weight_decay=train.weight_decay,
        max_grad_norm=train.max_grad_norm or 0.0,
        seed=train.seed,
        data_seed=train.seed,
        use_cpu=on_cpu,
        ddp_backend="gloo" if on_cpu and is_distributed else None,
        ddp_timeout=train.timeout,
        logging_steps=train.log_every,
        logging_nan_inf_filter=False,  # log NaN and inf losses instead of filtering them out
        save_strategy="no",  # veomni_trainer.run.checkpoints decides when
        metric_for_best_model="loss" if train.early_stop else None,
        dataloader_drop_last=True,  # every step has the same shape
        # veomni_trainer.loop.corrected_trainer averages over processes. Trainer would multiply the experts' load-
        # balancing loss by their number.
        average_tokens_across_devices=False,
        accelerator_config={"dispatch_batches": False},  # each process reads its own sequences of a stream
        bf16=train.precision == "bf16_mixed",
        fp16=train.precision == "fp16_mixed",
        torch_compile=train.torch_compile,
        report_to="none",
        disable_tqdm=True,
        log_level="error",  # what a user is to hear of is refused, or printed by the job
        **_checkpointing(train),
        remove_unused_columns=False,  # what the model doesn't take, such as a sequence's chat, is the collator's
        **({"fsdp": True, "fsdp_config": dict(_FSDP)} if train.fsdp else {}),
        **more,
    )
    arguments._n_gpu = min(arguments.n_gpu, 1)  # without torchrun transformers would use nn.DataParallel
    return arguments


def check_precision(precision: PrecisionName | None, on_cpu: bool) -> None:
    """Raise HostError if this machine can't compute in ``precision``."""
    if precision == "fp16_mixed" and on_cpu:
        raise HostError(
            "train.precision is fp16_mixed, but accelerate scales losses on accelerators only, and this job runs on "
            "the CPU. Write train.precision: bf16_mixed or float32"
        )
    if precision == "bf16_mixed" and not on_cpu and not is_torch_bf16_gpu_available():
        raise HostError(
            "train.precision is bf16_mixed, but this accelerator does not compute in bfloat16. Write "
            "fp16_mixed or float32"
        )


def device_of(train: TrainSection) -> torch.device:
    """The device that a single process of the job trains on.

    Raises:
        HostError: it is not available.
    """
    if train.device == "cuda" and not torch.cuda.is_available():
        raise HostError("train.device is cuda, but torch sees no CUDA device here. Write auto or cpu")
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cpu") if train.device == "cpu" or accelerator is None else accelerator


def _checkpointing(train: TrainSection) -> dict[str, Any]:
    """Gradient checkpointing, under the argument name of this version of transformers."""
    names = {field.name for field in dataclasses.fields(TrainingArguments)}
    name = "activation_checkpointing" if "activation_checkpointing" in names else "gradient_checkpointing"
    # Random states can't be read while a graph is captured. StepGraphs sees to it that there is nothing to draw again.
    graphs = {f"{name}_kwargs": {"use_reentrant": False, "preserve_rng_state": False}} if train.cuda_graphs else {}
    return {name: train.gradient_checkpointing, **graphs}


def may_leave_parameters_unused(model: PreTrainedModel, plan: Plan, train: TrainSection) -> bool:
    """Whether a step may leave parameters of ``model`` without a gradient.

    Experts may get no token, and text leaves the image or audio part of a model unused. All parameters of a dense
    language model are used in each step, so DDP needn't walk its graph. With gradient checkpointing DDP can't look.
    """
    if train.gradient_checkpointing:
        return False
    has_experts = any(op.op_name == "moe_experts" and op.sites for op in plan.ops)
    return has_experts or model.config.get_text_config() is not model.config
