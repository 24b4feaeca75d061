"""Keys of the section ``train``: by which method it learns, and the settings of that method."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from veomni_trainer.job.section import Number, Section

PAIRS, PROMPTS = ("prompt", "chosen", "rejected"), ("prompt",)
_COLUMNS = {
    **dict.fromkeys(("dpo", "orpo", "reward"), PAIRS),
    **dict.fromkeys(("grpo", "rloo"), PROMPTS),
    "kto": ("prompt", "completion", "label"),
}


class DpoKeys(Section):
    """Settings of direct preference optimization; defaults are TRL's."""

    beta: Number = Field(default=0.1, gt=0.0)
    """How strongly the model is held to its reference, which is the model before training."""
    loss_type: Literal["sigmoid", "hinge", "ipo", "robust", "nca_pair"] = "sigmoid"
    """The loss of a pair; TRL's name."""
    label_smoothing: Number = Field(default=0.0, ge=0.0, lt=0.5)
    """The part of the pairs that are assumed to be the wrong way round."""


class KtoKeys(Section):
    """Settings of Kahneman-Tversky optimization; defaults are TRL's."""

    beta: Number = Field(default=0.1, gt=0.0)
    """How strongly the model is held to its reference, which is the model before training."""
    loss_type: Literal["kto", "apo_zero_unpaired"] = "kto"
    """The loss of a completion; TRL's name."""
    desirable_weight: Number = Field(default=1.0, gt=0.0)
    """The weight of completions that are wanted."""
    undesirable_weight: Number = Field(default=1.0, gt=0.0)
    """The weight of completions that are not."""


class OrpoKeys(Section):
    """Settings of odds ratio preference optimization; defaults are TRL's."""

    beta: Number = Field(default=0.1, gt=0.0)
    """The weight of the odds ratio beside the loss of the chosen (the paper's lambda)."""


class DrawnKeys(Section):
    """What methods have in common that draw completions and have them judged."""

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

    @model_validator(mode="after")
    def _rewards_can_be_told_apart(self) -> Self:
        names = [each.rpartition(":")[2] for each in self.rewards]
        if not names:
            raise ValueError("reward is an empty list; name a function that judges a completion")
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"reward names {twice[0]} twice, and metrics have one figure of that name; rename one")
        return self


class GrpoKeys(DrawnKeys):
    """Settings of group relative policy optimization; defaults are TRL's."""

    replay_routers: bool = False
    """Whether training sends each token to the experts that it went to when it was drawn."""


class RlooKeys(DrawnKeys):
    """Settings of REINFORCE leave-one-out; defaults are TRL's."""

    num_generations: int = Field(default=2, ge=2)
    """Completions per prompt. ``batch_size`` counts completions, so a step's are a multiple of it."""
    beta: Number = Field(default=0.05, ge=0.0)
    """The weight of the divergence from the model before training; at 0 there is no reference model."""


class RewardKeys(Section):
    """Settings of reward models; defaults are TRL's."""

    center_rewards_coefficient: Number | None = Field(default=None, gt=0.0)
    """The weight of a term that holds rewards around zero, such as 0.01."""


class ClassifyKeys(Section):
    """Settings of sequence classifiers."""

    text: str = "text"
    """The column with the text."""
    label: str = "label"
    """The column with its label: text, or a number."""
    labels: list[str] | None = Field(default=None, min_length=2)
    """The labels in the order of the model's scores; by default those of ``model.weights`` where it is a classifier of
    the labels in the data, else the data's in order."""


class MethodKeys(Section):
    """By which method the model learns."""

    method: Literal["pretrain", "sft", "dpo", "kto", "orpo", "grpo", "rloo", "reward", "classify"] = "pretrain"
    """Whose loss: transformers' of all learned tokens (``pretrain``) or of labels (``classify``), or that of TRL's
    trainer of this name."""
    dpo: DpoKeys | None = None
    """Settings of ``method: dpo``."""
    kto: KtoKeys | None = None
    """Settings of ``method: kto``."""
    orpo: OrpoKeys | None = None
    """Settings of ``method: orpo``."""
    grpo: GrpoKeys | None = None
    """Settings of ``method: grpo``."""
    rloo: RlooKeys | None = None
    """Settings of ``method: rloo``."""
    reward: RewardKeys | None = None
    """Settings of ``method: reward``."""
    classify: ClassifyKeys | None = None
    """Settings of ``method: classify``."""
    parity: Literal["stop", "warn"] | None = None
    """What follows where training's log-probabilities differ from those with which ``grpo`` or ``rloo`` drew the same
    tokens: by anything, where the plan requires ``batch_invariant``, else by more than ``parity_limit``."""
    parity_limit: Number = Field(default=0.1, gt=0.0)
    """The largest difference that ``parity`` accepts where the plan promises no equal bits."""

    @property
    def uses_trl(self) -> bool:
        """Whether the method is one of TRL's trainers'."""
        return self.method not in ("pretrain", "classify")

    @property
    def learns_from_rows(self) -> bool:
        """Whether the data is rows of a table for the method's trainer, and not documents to tokenize."""
        return self.method not in ("pretrain", "sft")

    @property
    def scores_sequences(self) -> bool:
        """Whether the model has a head of scores for each sequence in place of one for the next token."""
        return self.method in ("reward", "classify")

    @property
    def takes_images(self) -> bool:
        """Whether the method learns from rows whose prompts may have images, and neither video nor audio."""
        return self.method in ("dpo", "kto", "grpo", "rloo")

    @property
    def takes_logprobs(self) -> bool:
        """Whether the loss is computed from log-probabilities that the model's head gives."""
        return self.uses_trl and self.method not in ("reward", "orpo")  # TRL's ORPO takes whole logits

    @property
    def drawn(self) -> DrawnKeys | None:
        """The settings of a method that draws completions."""
        return self.grpo or self.rloo

    @property
    def has_reference(self) -> bool:
        """Whether the trained model is compared with the one before training."""
        return self.method in ("dpo", "kto") or (self.drawn is not None and self.drawn.beta > 0)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the rows that the method learns from."""
        if self.method == "classify":
            settings = self.classify or ClassifyKeys()
            return settings.text, settings.label
        return _COLUMNS.get(self.method, ())

    @property
    def sequences_per_row(self) -> int:
        """How many sequences are computed of each row that ``batch_size`` counts."""
        return 2 if self.columns == PAIRS else 1

    @model_validator(mode="after")
    def _settings_are_of_the_method(self) -> Self:
        for name in (*_COLUMNS, "classify"):
            if getattr(self, name) is not None and self.method != name:
                raise ValueError(f"{name} has the settings of method: {name}, and method is {self.method}; remove one")
        if self.parity and self.method not in ("grpo", "rloo"):
            raise ValueError(f"parity compares what grpo or rloo draws, and method is {self.method}; leave it out")
        if self.method in ("grpo", "rloo") and self.drawn is None:
            raise ValueError(f"method: {self.method} needs {self.method}.reward, the function that judges a completion")
        return self
