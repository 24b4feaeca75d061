"""Whether the disk of a run's folder has room for its checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import PreTrainedModel

from veomni_core.errors import HostError
from veomni_trainer.job.train_section import TrainSection
from veomni_trainer.output.disk import free_bytes
from veomni_trainer.output.folder import RunFolder

if TYPE_CHECKING:
    from peft import PeftModel


def checkpoint_bytes(model: PreTrainedModel | PeftModel) -> int:
    """About how large a checkpoint is: the weights, and two states of the optimizer for each that is trained.

    Of an adapter it holds the trained weights alone.
    """
    frozen = 0 if hasattr(model, "peft_config") else 1
    return sum(p.numel() * p.element_size() * (3 if p.requires_grad else frozen) for p in model.parameters())


def check_disk_space(train: TrainSection, folder: RunFolder, model: PreTrainedModel | PeftModel) -> None:
    """Raise HostError if the job writes checkpoints, and the disk has no room for one."""
    needed, free = checkpoint_bytes(model), free_bytes(folder.path)
    if train.save_every != "never" and free < needed:
        raise HostError(
            f"train.output_dir: {describe_disk_space(folder, needed, free)}. Free some, or name another folder"
        )


def describe_disk_space(folder: RunFolder, needed: int, free: int) -> str:
    """``a checkpoint takes about 1,200 bytes, and the disk of runs/first has 800 free``."""
    return f"a checkpoint takes about {needed:,} bytes, and the disk of {folder.path} has {free:,} free"
