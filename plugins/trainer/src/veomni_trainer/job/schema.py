"""The schema of a training job's YAML: its sections, their keys, types and defaults.

The core reads the section ``model``, as it does for ``veomni plan``.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from veomni_core.jobs.job_model import ModelSection, read_model_section

STDLIB = "python-stdlib"  # in data.files: the sources of Python's standard library instead of a path
BYTES = "bytes"  # in data.tokenizer: a token per byte instead of a path

_SCIENTIFIC = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")


def _read_scientific(value: Any) -> Any:
    """Read ``1e-3`` as a number: YAML 1.1 takes it for text, since it has no decimal point."""
    return float(value) if isinstance(value, str) and _SCIENTIFIC.fullmatch(value) else value


Number = Annotated[float, BeforeValidator(_read_scientific)]


class Section(BaseModel):
    """A part of a job. Unknown keys, and values of another type than declared, are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class DataSection(Section):
    """The training text, and how it is tokenized and split.

    ``files`` names files, folders (searched by ``pattern``), globs, or ``python-stdlib``. ``tokenizer`` is ``bytes``
    or the path of a ``tokenizer.json``. ``end_of_document`` is its token that ends a document; if it isn't named, a
    token with a usual name is chosen.
    """

    files: str | list[str]
    pattern: str = "**/*"
    tokenizer: str = BYTES
    end_of_document: str | None = None
    sequence_length: int = Field(ge=2)
    validation_fraction: Number = Field(default=0.0, ge=0.0, le=0.5)


class ParallelPlan(Section):
    """Rules that override the model's own: a module's or parameter's pattern, and how transformers shards it."""

    tp: dict[str, str] = {}
    ep: dict[str, str] = {}
    fsdp: dict[str, str] = {}


class TrainSection(Section):
    """How to train. ``batch_size`` counts sequences per process and per accumulated micro-step.

    ``save_every``: checkpoints are written every so many steps and at the end, only at the ``end``, or ``never``; an
    interrupt always writes one. ``keep_checkpoints``: how many of the newest are kept. ``bf16``: float32 weights train
    under autocast to bfloat16. ``sp_size``: so many processes share each sequence (Ulysses sequence parallelism).

    ``fsdp_size``, ``tp_size``, ``ep_size``: transformers shards the model while it is loaded, over
    ``fsdp_size x tp_size`` processes (:attr:`is_sharded`). ``timeout``: how many seconds processes wait for each other.
    ``expert_loads``: whether to measure how many tokens each expert gets; by default where ``ep_size`` is above 1.
    """

    output_dir: str = Field(min_length=1)
    steps: int = Field(ge=1)
    batch_size: int = Field(default=8, ge=1)
    gradient_accumulation: int = Field(default=1, ge=1)
    learning_rate: Number = Field(default=3e-4, gt=0.0)
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    warmup: int = Field(default=0, ge=0)
    weight_decay: Number = Field(default=0.1, ge=0.0)
    max_grad_norm: Number = Field(default=1.0, gt=0.0)
    seed: int = Field(default=0, ge=0)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    log_every: int = Field(default=1, ge=1)
    validate_every: int | None = Field(default=None, ge=1)
    save_every: Annotated[int, Field(ge=1)] | Literal["end", "never"] = "end"
    keep_checkpoints: int = Field(default=2, ge=1)
    bf16: bool = False
    gradient_checkpointing: bool = False
    torch_compile: bool = False
    fsdp: bool = False
    sp_size: int = Field(default=1, ge=1)
    fsdp_size: int = Field(default=1, ge=1)
    tp_size: int = Field(default=1, ge=1)
    ep_size: int = Field(default=1, ge=1)
    parallel_plan: ParallelPlan | None = None
    expert_loads: bool | None = None
    timeout: int = Field(default=1800, ge=1)
    export: bool = False

    @property
    def is_sharded(self) -> bool:
        """Whether transformers shards the model while it is loaded."""
        return self.fsdp_size * self.tp_size > 1

    @property
    def measures_loads(self) -> bool:
        """Whether the experts' loads are measured: as the job says, else where experts are on several processes."""
        return self.ep_size > 1 and not self.torch_compile if self.expert_loads is None else self.expert_loads

    @property
    def ranks_per_batch(self) -> int:
        """How many neighbouring ranks train on the same batch."""
        return self.sp_size * self.tp_size


class Job(Section):
    """A validated training job with all defaults."""

    model: Annotated[ModelSection, BeforeValidator(read_model_section)]
    data: DataSection
    train: TrainSection

    @model_validator(mode="after")
    def _says_nothing_in_vain(self) -> Self:
        if self.model.dtype == "float16":
            raise ValueError(
                "model.dtype: float16 holds nothing below 6e-8, so weights, gradients and optimizer states in it lose "
                "small updates; write bfloat16 or float32"
            )
        if self.train.bf16 and self.model.dtype != "float32":
            raise ValueError(
                f"train.bf16 computes in bfloat16 on float32 weights, but model.dtype is {self.model.dtype}; write "
                "model.dtype: float32, or leave train.bf16 out"
            )
        if self.train.validate_every is not None and not self.data.validation_fraction:
            raise ValueError("train.validate_every needs sequences to validate on; set data.validation_fraction")
        if self.train.warmup > self.train.steps:
            raise ValueError(
                f"train.warmup is {self.train.warmup} steps, but train.steps is {self.train.steps}; lower train.warmup"
            )
        if self.data.sequence_length % self.train.sp_size:
            raise ValueError(
                f"train.sp_size: {self.train.sp_size} processes can't share data.sequence_length "
                f"{self.data.sequence_length} equally; write a multiple of {self.train.sp_size}"
            )
        return self

    @model_validator(mode="after")
    def _sizes_fit_each_other(self) -> Self:
        train = self.train
        fsdp, tp, ep = train.fsdp_size, train.tp_size, train.ep_size
        if train.fsdp and (train.is_sharded or ep > 1):
            raise ValueError(
                f"train.fsdp: true shards over all processes by accelerate, and train.fsdp_size {fsdp}, tp_size {tp}, "
                f"ep_size {ep} by transformers; write train.fsdp: false, and the number of processes as fsdp_size"
            )
        if (fsdp * tp) % ep:
            raise ValueError(
                f"train.ep_size: {ep} does not divide the {fsdp * tp} processes of fsdp_size {fsdp} x tp_size {tp}; "
                "experts are spread over those processes, so write a divisor of them"
            )
        if ep > 1 and ep % tp:
            raise ValueError(
                f"train.ep_size: {ep} is no multiple of tp_size {tp}; experts aren't split along their width, so the "
                f"{tp} processes of a tensor-parallel group must hold different ones. Write a multiple of {tp}"
            )
        if train.sp_size > 1 and tp > 1:
            raise ValueError(
                f"train.sp_size {train.sp_size} and tp_size {tp} can't be combined: both divide the attention's heads "
                "among processes. Write 1 for one of them"
            )
        if train.export and (train.save_every == "never" or train.fsdp):
            raise ValueError(
                "train.export writes the last checkpoint's weights as plain files: that needs a checkpoint, and "
                "accelerate's FSDP writes none that can be read so; set save_every, or fsdp_size in place of fsdp: true"
            )
        if train.expert_loads and train.torch_compile:
            raise ValueError(
                "train.expert_loads counts by hooks, which a compiled model doesn't call; write torch_compile: false"
            )
        if train.parallel_plan is not None and not train.is_sharded:
            raise ValueError(
                "train.parallel_plan says how a sharded model is sharded; set train.fsdp_size or train.tp_size above 1"
            )
        return self
