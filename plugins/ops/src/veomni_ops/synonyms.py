"""Names that ops, kernels, hardware and subcommands have elsewhere, and usual abbreviations."""

from __future__ import annotations

from collections.abc import Mapping

SYNONYMS: Mapping[str, tuple[str, ...]] = {
    # ops, and the fields that choose their kernels
    "attn": ("attention", "attn_implementation"),
    "attention": ("attn_implementation",),
    "ce": ("cross_entropy_loss", "cross_entropy_loss_implementation"),
    "aux_loss": ("load_balancing_loss", "load_balancing_loss_implementation"),
    "router_loss": ("load_balancing_loss", "load_balancing_loss_implementation"),
    "dispatch": ("token_dispatch", "token_dispatch_implementation"),
    "experts_implementation": ("moe_implementation",),
    "ffn": ("swiglu_mlp", "swiglu_mlp_implementation"),
    "moe": ("moe_experts", "moe_implementation"),
    "moe_experts": ("moe_implementation",),
    "mlp": ("swiglu_mlp", "swiglu_mlp_implementation"),
    "rmsnorm": ("rms_norm", "rms_norm_implementation"),
    "rope": ("rotary_pos_emb", "rotary_pos_emb_implementation"),
    "rotary": ("rotary_pos_emb", "rotary_pos_emb_implementation"),
    # kernels and presets
    "fa2": ("flash_attention_2",),
    "fa3": ("flash_attention_3",),
    "fa4": ("flash_attention_4",),
    "flash": ("flash_attention_2", "flash_attention_3", "flash_attention_4"),
    "flash_attn": ("flash_attention_2", "flash_attention_3", "flash_attention_4"),
    "flex": ("flex_attention",),
    "native": ("eager",),
    "none": ("eager",),
    "pytorch": ("torch", "sdpa", "grouped_mm", "chunk_loss"),
    "default": ("auto",),
    # dtypes
    "f32": ("float32",),
    "float": ("float32",),
    "fp32": ("float32",),
    "single": ("float32",),
    "bf16": ("bfloat16",),
    "f16": ("float16",),
    "fp16": ("float16",),
    "half": ("float16",),
    # devices and hardware
    "ada": ("l4", "l40s", "rtx4090"),
    "amd": ("rocm",),
    "ampere": ("a100", "a10g"),
    "ascend": ("npu",),
    "blackwell": ("b200", "gb200", "b300", "rtx5090"),
    "gpu": ("cuda",),
    "hip": ("rocm",),
    "hopper": ("h100", "h200"),
    "metal": ("mps",),
    "nvidia": ("cuda",),
    "apple": ("mps",),
    # subcommands
    "check": ("verify", "plan"),
    "convert": ("export",),
    "dry_run": ("plan",),
    "env": ("doctor",),
    "finetune": ("train",),
    "fit": ("train",),
    "info": ("doctor", "list"),
    "ls": ("list",),
    "merge": ("export",),
    "pretrain": ("train",),
    "run": ("train",),
    "test": ("verify",),
    "why": ("explain",),
}
