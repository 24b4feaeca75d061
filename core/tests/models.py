"""Tiny real transformers models of the families that the binding tests cover."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

# A loss, and every gradient by parameter name.
Step = tuple[torch.Tensor, dict[str, torch.Tensor]]

_SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "output_router_logits": True,
}
_EXTRA: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": _EXPERTS,
    "mixtral": _EXPERTS,
    "deepseek_v3": {
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
    },
    # Seed-OSS drops values out after its MLP; without that, its MLP is the standard one.
    "seed_oss": {"residual_dropout": 0.0, "attention_dropout": 0.0},
    "gemma3_text": {},
    "olmo2": {},
}
FAMILIES = tuple(_EXTRA)
FAMILIES_WITH_EXPERTS = ("qwen3_moe", "mixtral", "deepseek_v3")
EVERY_KERNEL = {"preset": "eager", **dict.fromkeys(
    (
        "rms_norm_implementation",
        "swiglu_mlp_implementation",
        "rotary_pos_emb_implementation",
        "cross_entropy_loss_implementation",
        "chunk_gated_delta_rule_implementation",
        "kda_implementation",
        "mamba2_scan_implementation",
        "selective_scan_implementation",
        "dsa_indexer_implementation",
        "dsa_attention_implementation",
        "moe_implementation",
        "load_balancing_loss_implementation",
    ),
    "auto",
)}  # fmt: skip


def build(family: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A model of ``family`` in training mode, with weights drawn from ``seed``."""
    config = CONFIG_MAPPING[family](**{**_SMALL, **_EXTRA.get(family, {}), **overrides})
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).train()


def tokens(batch: int = 2, length: int = 9, seed: int = 1) -> torch.Tensor:
    """Random token ids without the special ones."""
    return torch.randint(3, 64, (batch, length), generator=torch.Generator().manual_seed(seed))


def step(model: PreTrainedModel, ids: torch.Tensor | None = None) -> Step:
    """The loss of one forward and backward, and every gradient by parameter name; dropout is the same each time."""
    ids = tokens() if ids is None else ids
    torch.manual_seed(1)
    model.zero_grad(set_to_none=True)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def off_by(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """The difference of all gradients, as a share of their norm."""
    assert found.keys() == wanted.keys()
    difference = torch.stack([(found[name] - each).float().norm() for name, each in wanted.items()]).norm()
    return float(difference / torch.stack([each.float().norm() for each in wanted.values()]).norm())


def assert_equal_steps(found: Step, wanted: Step) -> None:
    """Equal up to another order of float32 summation, in the loss and every gradient."""
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-6, atol=1e-6)
    assert found[1].keys() == wanted[1].keys()
    for name, gradient in wanted[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def assert_same_bits(found: Step, wanted: Step) -> None:
    """Equal in every bit of the loss and the gradients."""
    assert torch.equal(found[0], wanted[0])
    assert found[1].keys() == wanted[1].keys()
    assert all(torch.equal(found[1][name], gradient) for name, gradient in wanted[1].items())
