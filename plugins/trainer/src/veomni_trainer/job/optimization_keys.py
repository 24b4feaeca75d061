"""Keys of the section ``train``: how weights are optimized."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from veomni_trainer.job.parameter_groups import ParameterGroup, Tower
from veomni_trainer.job.section import Number, Section


class EarlyStop(Section):
    """When training ends before its last step."""

    patience: int = Field(ge=1)
    """So many validations in a row without an improvement end the training."""
    min_improvement: Number = Field(default=0.0, ge=0.0)
    """The validation loss improves where it falls by more than this."""


def _off_is_false(value: Any) -> Any:
    return False if value in (None, "off") else value


Frozen = Tower | Literal["text"]
Clipping = Annotated[Annotated[Number, Field(gt=0.0)] | Literal[False], BeforeValidator(_off_is_false)]


class OptimizationKeys(Section):
    """How many steps, over how much data at a time, and how each step changes the weights."""

    steps: Annotated[int, Field(ge=1)] | None = None
    """Optimizer steps. A job has either these or ``epochs``."""
    epochs: Annotated[Number, Field(gt=0.0)] | None = None
    """How often the training sequences are passed over; 0.5 is half of them."""
    batch_size: int = Field(default=8, ge=1)
    """Sequences per process and per accumulated micro-step."""
    gradient_accumulation: int = Field(default=1, ge=1)
    """Micro-steps per optimizer step."""
    optimizer: str | dict[str, Any] | None = None
    """A name of transformers' optimizers or ``muon``, or a mapping of ``name`` and that optimizer's options; by default
    AdamW, fused where torch has that."""
    learning_rate: Number = Field(default=3e-4, gt=0.0)
    """The highest learning rate."""
    schedule: str = "cosine"
    """How the learning rate changes after the warm-up: a name of transformers' schedules."""
    schedule_options: dict[str, Any] = Field(default_factory=dict)
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

    @model_validator(mode="after")
    def _is_unambiguous(self) -> Self:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("needs either steps or epochs" + (", and not both" if self.steps else ""))
        if isinstance(self.optimizer, dict) and not isinstance(self.optimizer.get("name"), str):
            raise ValueError(
                "optimizer: a mapping needs the optimizer's name, as {name: adamw_torch, betas: [0.9, 0.95]}"
            )
        return self
