"""Keys of the section ``train``: where, in which precision and with how much memory a step is computed."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from veomni_trainer.job.precision import PrecisionName
from veomni_trainer.job.section import Section


class ComputationKeys(Section):
    """How a step is computed."""

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
