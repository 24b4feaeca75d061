"""A tiny Llama whose loss alone is fused with its output projection, beside its eager twin."""

from __future__ import annotations

from transformers import PreTrainedModel

from counting_kernels import calls, counting_registry
from models import build
from veomni_core import bind

REGISTRY = counting_registry("one")
LOSS_ALONE = {"preset": "eager", "cross_entropy_loss_implementation": "one"}


def bound_and_eager(**options) -> tuple[PreTrainedModel, PreTrainedModel]:
    model, eager = build("llama"), build("llama")
    bind(model, {**LOSS_ALONE, **options}, registry=REGISTRY)
    return model, eager


def fused_losses() -> int:
    return calls[("cross_entropy_loss", "causal", "one")]
