"""The section ``train``: what a run does, in which steps and how they are computed, and what it writes."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from veomni_trainer.job.method_keys import MethodKeys
from veomni_trainer.job.parameter_groups import ParameterGroup, Tower
from veomni_trainer.job.precision import PrecisionName
from veomni_trainer.job.section import Number, Options, Section


def hub_name(name: str) -> str:
    """``name``, if it can be that of a repository of the Hub.

    Raises:
        ValueError: it can't.
    """
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ValueError(str(error)) from None
    if "/" not in name:
        raise ValueError(f"write whose repository it is: org/{name}")
    return name


class ProfileKeys(Section):
    """Which steps torch's profiler records."""

    steps: int = Field(default=3, ge=1)
    """How many."""
    wait: int = Field(default=2, ge=0)
    """After how many steps of this run: the first ones compile and allocate."""


class OutputKeys(Section):
    """What a run measures, writes and keeps."""

    output_dir: str = Field(min_length=1)
    """The run's folder, relative to the working directory."""
    log_every: int = Field(default=1, ge=1)
    """Steps between two lines of ``metrics.jsonl``."""
    validate_every: int | None = Field(default=None, ge=1)
    """Steps between two validations; by default there is one at the end."""
    save_every: Annotated[int, Field(ge=1)] | Literal["end", "never"] = 500
    """Steps between two checkpoints (one is written at the end too), or only at the ``end``, or ``never``."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """How many of the newest checkpoints are kept."""
    on_bad_loss: Literal["stop", "warn"] = "stop"
    """What follows when a step's loss or gradient norm is not finite. Such a step is never saved."""
    export: bool | Literal["merged"] = False
    """Whether the last checkpoint's weights are also written as plain safetensors; of LoRA the adapter, or with
    ``merged`` the weights with the adapter in them."""
    push_to: Annotated[str, AfterValidator(hub_name)] | None = None
    """The Hub's repository, ``org/name``, that the export is sent to at the end; a new one is private."""
    expert_loads: bool | None = None
    """Whether to measure how many tokens each expert gets; by default where ``ep_size`` is above 1."""
    profile: ProfileKeys | None = None
    """A few steps are recorded by torch's profiler: a trace, and a table of where their time went."""
    report_to: list[Literal["tensorboard", "wandb", "trackio"]] = Field(default_factory=list)
    """Where each line of ``metrics.jsonl`` is sent too."""


class EarlyStop(Section):
    """When training ends before its last step."""

    patience: int = Field(ge=1)
    """So many validations in a row without an improvement end the training."""
    min_improvement: Number = Field(default=0.0, ge=0.0)
    """The validation loss improves where it falls by more than this."""


def _off_is_false(value: Any) -> Any:
    if value == 0 and value is not False:  # which equals 0
        raise ValueError("must be above 0; off leaves gradients as they are")
    return False if value in (None, "off") else value


Frozen = Tower | Literal["text"]
Clipping = Annotated[Annotated[Number, Field(gt=0.0)] | Literal[False], BeforeValidator(_off_is_false)]


class ParallelPlan(Section):
    """Rules that override the model's own: a module's or parameter's pattern, and how transformers shards it."""

    tp: dict[str, str] = Field(default_factory=dict)
    """For tensor parallelism."""
    ep: dict[str, str] = Field(default_factory=dict)
    """For expert parallelism."""
    fsdp: dict[str, str] = Field(default_factory=dict)
    """For FSDP."""


class TrainSection(MethodKeys, OutputKeys):
    """How to train. The keys stand side by side in the YAML."""

    steps: Annotated[int, Field(ge=1)] | None = None
    """Optimizer steps. A job has either these or ``epochs``."""
    epochs: Annotated[Number, Field(gt=0.0)] | None = None
    """How often the training sequences are passed over; 0.5 is half of them."""
    batch_size: int = Field(default=8, ge=1)
    """Sequences per process and per accumulated micro-step."""
    gradient_accumulation: int = Field(default=1, ge=1)
    """Micro-steps per optimizer step."""
    optimizer: str | Options | None = None
    """A name of transformers' optimizers or ``muon``, or a mapping of ``name`` and that optimizer's options; by default
    AdamW, fused where torch has that."""
    learning_rate: Number = Field(default=3e-4, gt=0.0)
    """The highest learning rate."""
    schedule: str = "cosine"
    """How the learning rate changes after the warm-up: a name of transformers' schedules."""
    schedule_options: Options = Field(default_factory=dict)
    """Options of that schedule."""
    warmup: Annotated[int, Field(ge=0)] | Annotated[Number, Field(gt=0.0, lt=1.0)] = 0
    """Steps in which the learning rate rises from zero; below 1, this part of all steps."""
    weight_decay: Number = Field(default=0.1, ge=0.0)
    """The optimizer's weight decay. Biases and the weights of norms have none."""
    parameter_groups: list[ParameterGroup] = Field(default_factory=list)
    """Parameters with another learning rate or weight decay. The first group that matches a name decides."""
    freeze: list[Frozen] = Field(default_factory=list)
    """Parts of a model of images, video or audio that stay as they are; ``text`` is its decoder."""
    max_grad_norm: Clipping = 1.0
    """Gradients of a larger norm are scaled down to it; ``off`` or ``null`` leaves them as they are."""
    early_stop: EarlyStop | None = None
    """When training ends before its last step; by default never."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """The seed of random weights, of dropout and of the order of sequences."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """``auto`` is an accelerator where there is one."""
    precision: PrecisionName | None = None
    """In which dtypes weights are held and steps computed; by default ``bf16_mixed`` where an accelerator has bfloat16,
    otherwise ``float32``."""
    gradient_checkpointing: bool = False
    """Whether activations are computed again in the backward instead of kept."""
    torch_compile: bool = False
    """Whether torch compiles the model."""
    cuda_graphs: bool = False
    """Whether forward and backward run as a CUDA graph, on one NVIDIA GPU: for small steps, which Python's launches
    bound. The loss and all gradients are those without it."""
    verify: bool = False
    """Whether every chosen kernel is first checked against its op's contract, on this machine, and each bound site."""
    shadow: int = Field(default=0, ge=0)
    """In so many first steps each bound site's own code runs beside its kernel. A difference ends training on all
    processes, before the weights change."""
    frozen: str | None = None
    """The path of a lock file: whatever differs from it, of the plugins or of the plan, is refused."""
    # How the processes share the work. Without any of these keys each has the whole model and its own batches.
    fsdp: bool = False
    """Whether accelerate shards the model (FSDP2) after each process has built it whole."""
    sp_size: int = Field(default=1, ge=1)
    """So many processes share each sequence (Ulysses sequence parallelism)."""
    cp_size: int = Field(default=1, ge=1)
    """So many such groups share each sequence: attention's keys and values travel round a ring of them."""
    sp_overlap: bool = False
    """Whether the processes of sp_size exchange queries, keys and values while the next of them are projected."""
    fsdp_size: int = Field(default=1, ge=1)
    """Over so many groups of processes transformers shards the model while it is loaded (FSDP2)."""
    tp_size: int = Field(default=1, ge=1)
    """So many processes compute each layer together (tensor parallelism)."""
    ep_size: int = Field(default=1, ge=1)
    """So many processes hold different experts (expert parallelism)."""
    parallel_plan: ParallelPlan | None = None
    """Rules that override the model's own plan of what is sharded how."""
    timeout: int = Field(default=1800, ge=1)
    """How many seconds processes wait for each other."""

    @property
    def optimizer_name(self) -> str | None:
        """The optimizer's name, without its options."""
        return self.optimizer.get("name") if isinstance(self.optimizer, dict) else self.optimizer

    @property
    def optimizer_options(self) -> dict[str, Any]:
        """The options that the job gives to its optimizer."""
        named = self.optimizer if isinstance(self.optimizer, dict) else {}
        return {key: value for key, value in named.items() if key != "name"}

    @property
    def scheduler_type(self) -> str:
        """transformers' name of the schedule. What it calls ``constant`` has no warm-up."""
        return "constant_with_warmup" if self.schedule == "constant" else self.schedule

    def too_long_warmup(self, steps: int) -> str:
        """Why a training of so many steps would never have its learning rate; empty if it would."""
        if not self.warmup or (self.warmup if self.warmup >= 1 else math.ceil(self.warmup * steps)) < steps:
            return ""
        length = "steps" if self.steps else "epochs"
        return (
            f"train.warmup: {self.warmup} is as long as the training or longer, and train.{length} gives {steps} "
            "steps in all, so train.learning_rate would never be reached; lower train.warmup"
        )

    @property
    def is_sharded(self) -> bool:
        """Whether transformers shards the model while it is loaded."""
        return self.fsdp_size * self.tp_size > 1

    @property
    def ranks_per_sequence(self) -> int:
        """How many neighbouring ranks hold a part of each sequence."""
        return self.sp_size * self.cp_size

    @property
    def parts_of_sequence(self) -> int:
        """In how many parts sequences are cut, which must divide their length: a ring's ranks have two each."""
        return self.ranks_per_sequence * (2 if self.cp_size > 1 else 1)

    @property
    def ranks_per_batch(self) -> int:
        """How many neighbouring ranks train on the same batch."""
        return self.ranks_per_sequence * self.tp_size

    @property
    def measures_loads(self) -> bool:
        """Whether the experts' loads are measured: as the job says, else where experts are on several processes."""
        return self.ep_size > 1 and not self.torch_compile if self.expert_loads is None else self.expert_loads

    @model_validator(mode="after")
    def _is_unambiguous(self) -> Self:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("needs either steps or epochs" + (", and not both" if self.steps else ""))
        if isinstance(self.optimizer, dict) and not isinstance(self.optimizer.get("name"), str):
            raise ValueError(
                "optimizer: a mapping needs the optimizer's name, as {name: adamw_torch, betas: [0.9, 0.95]}"
            )
        return self
