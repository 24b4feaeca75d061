"""Keys of the section ``train``: where, in which precision and with how much memory a step is computed."""

from __future__ import annotations

from typing import Literal

from veomni_trainer.job.section import Section


class ComputationKeys(Section):
    """How a step is computed."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """``auto`` is an accelerator where there is one."""
    bf16: bool = False
    """Whether float32 weights train under autocast to bfloat16."""
    gradient_checkpointing: bool = False
    """Whether activations are computed again in the backward instead of kept."""
    torch_compile: bool = False
    """Whether torch compiles the model."""
    verify: bool = False
    """Whether every chosen kernel is first checked against its op's contract, on this machine, and each bound site."""
