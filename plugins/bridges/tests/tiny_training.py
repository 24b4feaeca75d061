"""Tiny models, data and arguments for trainings of a few steps on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Trainer, TrainingArguments

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 256,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "output_router_logits": True}
AUTO = {"preset": "auto"}


def llama(**changes: Any) -> LlamaForCausalLM:
    """The same weights at every call."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SHAPE, **changes}))


def qwen3_moe() -> nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(Qwen3MoeConfig(**SHAPE, **EXPERTS, head_dim=8))


def sequences(count: int = 16, length: int = 12) -> list[dict[str, torch.Tensor]]:
    drawn = torch.randint(3, 64, (count, length), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": each, "labels": each} for each in drawn]


def arguments(folder: Any, **changes: Any) -> TrainingArguments:
    settings = {
        "output_dir": str(folder),
        "use_cpu": True,
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return TrainingArguments(**{**settings, **changes})


def trainer(model: nn.Module, folder: Any, *callbacks: Any, **changes: Any) -> Trainer:
    return Trainer(model, arguments(folder, **changes), train_dataset=sequences(), callbacks=list(callbacks))


def measured(trained: Trainer) -> list[float]:
    """The loss of each step, and the norm of its gradients: a loss may be zero, as GRPO's first one is."""
    steps = [row for row in trained.state.log_history if "loss" in row]
    return [row[name] for row in steps for name in ("loss", "grad_norm")]


def close(one: list[float], other: list[float], tolerance: float = 1e-5) -> bool:
    """Whether two runs differ by rounding only, and did learn something."""
    pairs = list(zip(one, other, strict=True))
    return any(one) and all(abs(a - b) <= tolerance * max(1.0, abs(b)) for a, b in pairs)
