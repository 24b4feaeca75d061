"""The models whose steps are measured, and what is done to them before."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlamaConfig,
    PreTrainedModel,
    Qwen2VLConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    Qwen3VLConfig,
)

MODELS: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "llama-1b": lambda: LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        vocab_size=128256,
        max_position_embeddings=32768,
    ),
    # The released model, whole: 28 small layers, which Python's launches bound.
    "qwen3-0.6b": lambda: Qwen3Config(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        tie_word_embeddings=True,
        max_position_embeddings=32768,
    ),
    "qwen3-moe": lambda: Qwen3MoeConfig(
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        vocab_size=151936,
        norm_topk_prob=True,
        output_router_logits=True,
        max_position_embeddings=32768,
    ),
    # Three layers of linear attention, and one of full attention.
    "qwen3-next": lambda: Qwen3NextConfig(num_hidden_layers=4, output_router_logits=True),
    "qwen3.5": lambda: Qwen3_5TextConfig(num_hidden_layers=4),
    "bamba": lambda: AutoConfig.for_model("bamba", num_hidden_layers=4),
    "falcon-h1": lambda: AutoConfig.for_model("falcon_h1", num_hidden_layers=4),
    # The widths of transformers' default configs, and some of the layers.
    "smollm3": lambda: AutoConfig.for_model("smollm3", num_hidden_layers=8),
    "olmoe": lambda: AutoConfig.for_model("olmoe", num_hidden_layers=6),
    "minimax-m2": lambda: AutoConfig.for_model("minimax_m2", num_hidden_layers=3),
    "exaone4": lambda: AutoConfig.for_model("exaone4", num_hidden_layers=12),
    # Models that take images, of the widths of those released as 2B: with 8 of 28 layers, and whole.
    "qwen3-vl": lambda: _shallow("qwen3-vl-2b"),
    "qwen2-vl": lambda: _shallow("qwen2-vl-2b"),
    "qwen3-vl-2b": lambda: Qwen3VLConfig(
        text_config={
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]},
        },
        vision_config={
            "depth": 24,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_heads": 16,
            "out_hidden_size": 2048,
            "deepstack_visual_indexes": [5, 11, 17],
        },
        tie_word_embeddings=True,
    ),
    "qwen2-vl-2b": lambda: Qwen2VLConfig(
        text_config={
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
        },
        vision_config={"depth": 32, "embed_dim": 1280, "hidden_size": 1536, "num_heads": 16},
        tie_word_embeddings=True,
    ),
}


def _shallow(model: str) -> transformers.PretrainedConfig:
    config = MODELS[model]()
    config.get_text_config().num_hidden_layers = 8
    return config


THEIRS = "transformers"
AS_A_GRAPH = ", as a CUDA graph"  # at the end of a contender's name, as this one:
FROM_HOST = ", positions from the host"  # of towers and text, computed before a step, as veomni train does


def _unchanged(model: PreTrainedModel) -> None:
    """As transformers builds it."""


def _liger(model: PreTrainedModel) -> None:
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    # Its experts search for minutes before their first step, so the model keeps its own.
    experts = {"swiglu": False} if model.config.model_type == "qwen3_moe" else {}
    _apply_liger_kernel_to_instance(model, **experts)


def _bound(**ops: str) -> Callable[[PreTrainedModel], None]:
    def bind_model(model: PreTrainedModel) -> None:
        from veomni_core import bind

        print(bind(model, ops).receipt.table(), file=sys.stderr)

    return bind_model


def _then_compiled(change: Callable[[PreTrainedModel], None]) -> Callable[[PreTrainedModel], None]:
    def change_and_compile(model: PreTrainedModel) -> None:
        change(model)
        model.compile()

    return change_and_compile


CONTENDERS: dict[str, Callable[[PreTrainedModel], None]] = {
    THEIRS: _unchanged,
    "transformers, compiled": _then_compiled(_unchanged),
    "Liger's own patch": _liger,
    "preset: gpu": _bound(preset="gpu"),
    "preset: auto": _bound(preset="auto"),
    f"{THEIRS}{FROM_HOST}": _unchanged,
    f"preset: auto{FROM_HOST}": _bound(preset="auto"),
    "preset: auto, flash_attention_4": _bound(preset="auto", attn_implementation="flash_attention_4"),
    "preset: auto, compiled": _then_compiled(_bound(preset="auto")),
    f"preset: auto{AS_A_GRAPH}": _bound(preset="auto"),
    # Equal bits in every batch, with products that have them too; not the fastest kernels.
    "require: batch_invariant": _bound(preset="auto", require="batch_invariant", linear_implementation="triton"),
    "preset: auto, fused_quack": _bound(preset="auto", moe_implementation="fused_quack"),
}


def contenders_of(model: str, skipped: Iterable[str]) -> list[str]:
    """By name; those that choose the experts' kernel only where there are experts, and towers' positions by towers."""
    config = MODELS[model]()
    without = [
        word for word, has in (("fused_", "num_experts"), (FROM_HOST, "vision_config")) if not hasattr(config, has)
    ]
    return [name for name in CONTENDERS if name not in skipped and not any(word in name for word in without)]


def auto_class(config: transformers.PretrainedConfig) -> Any:
    """transformers' class that builds the whole model of ``config``."""
    return AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM


def build(name: str) -> PreTrainedModel:
    """The model with weights of one seed, attention by ``sdpa``."""
    torch.manual_seed(0)
    config = MODELS[name]()
    with torch.device("cuda"):
        model: PreTrainedModel = auto_class(config).from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    return model.train()
