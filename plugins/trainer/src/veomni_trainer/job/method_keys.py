"""Keys of the section ``train``: by which method it learns, and the settings of that method."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from veomni_trainer.job.section import Number, Section


class DpoKeys(Section):
    """Settings of direct preference optimization; defaults are TRL's."""

    beta: Number = Field(default=0.1, gt=0.0)
    """How strongly the model is held to its reference, which is the model before training."""
    loss_type: Literal["sigmoid", "hinge", "ipo", "robust", "nca_pair"] = "sigmoid"
    """The loss of a pair; TRL's name."""
    label_smoothing: Number = Field(default=0.0, ge=0.0, lt=0.5)
    """The part of the pairs that are assumed to be the wrong way round."""


class GrpoKeys(Section):
    """Settings of group relative policy optimization; defaults are TRL's."""

    reward: str | list[str]
    """Functions that judge completions, each ``module:function`` or ``file.py:function`` beside the job."""
    num_generations: int = Field(default=8, ge=2)
    """Completions per prompt. ``batch_size`` counts completions, so a step's are a multiple of it."""
    max_completion_length: int = Field(default=256, ge=1)
    """The most tokens of a completion; ``data.sequence_length`` has room for it and the prompt."""
    temperature: Number = Field(default=1.0, gt=0.0)
    """What logits are divided by where completions are drawn, and in the loss."""
    beta: Number = Field(default=0.0, ge=0.0)
    """The weight of the divergence from the model before training; at 0 there is no reference model."""
    epsilon: Number = Field(default=0.2, gt=0.0)
    """How far the ratio of probabilities is clipped from 1."""

    @property
    def rewards(self) -> list[str]:
        """The functions, as a list."""
        return [self.reward] if isinstance(self.reward, str) else self.reward


class MethodKeys(Section):
    """By which method the model learns."""

    method: Literal["pretrain", "sft", "dpo", "grpo"] = "pretrain"
    """Whose loss: transformers' of all learned tokens (``pretrain``), or that of TRL's trainer of this name."""
    dpo: DpoKeys | None = None
    """Settings of ``method: dpo``."""
    grpo: GrpoKeys | None = None
    """Settings of ``method: grpo``."""

    @property
    def uses_trl(self) -> bool:
        """Whether the method is one of TRL's trainers'."""
        return self.method != "pretrain"

    @property
    def learns_from_rows(self) -> bool:
        """Whether the data is rows of a table for TRL, and not documents to tokenize."""
        return self.method in ("dpo", "grpo")

    @model_validator(mode="after")
    def _settings_are_of_the_method(self) -> Self:
        for name in ("dpo", "grpo"):
            if getattr(self, name) is not None and self.method != name:
                raise ValueError(f"{name} has the settings of method: {name}, and method is {self.method}; remove one")
        if self.method == "grpo" and self.grpo is None:
            raise ValueError("method: grpo needs grpo.reward, the function that judges a completion")
        return self
