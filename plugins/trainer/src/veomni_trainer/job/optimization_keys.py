"""Keys of the section ``train``: how weights are optimized."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from veomni_trainer.job.section import Number, Section


class OptimizationKeys(Section):
    """How many steps, over how much data at a time, and how each step changes the weights."""

    steps: int = Field(ge=1)
    """Optimizer steps."""
    batch_size: int = Field(default=8, ge=1)
    """Sequences per process and per accumulated micro-step."""
    gradient_accumulation: int = Field(default=1, ge=1)
    """Micro-steps per optimizer step."""
    learning_rate: Number = Field(default=3e-4, gt=0.0)
    """The highest learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """How the learning rate changes after the warm-up."""
    warmup: int = Field(default=0, ge=0)
    """Steps in which the learning rate rises from zero."""
    weight_decay: Number = Field(default=0.1, ge=0.0)
    """The optimizer's weight decay."""
    max_grad_norm: Number = Field(default=1.0, gt=0.0)
    """Gradients of a larger norm are scaled down to it."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """The seed of random weights, of dropout and of the order of sequences."""
