"""Keys of the section ``train``: what a run writes and when, and what is watched."""

from __future__ import annotations

from typing import Annotated, Literal

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from pydantic import AfterValidator, Field

from veomni_trainer.job.section import Section


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
