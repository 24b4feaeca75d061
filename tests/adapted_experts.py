"""Small models with PEFT's adapters of their fused experts, bound and not, and what a step of them gives."""

from __future__ import annotations

import peft
import torch
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from veomni_core import bind

SHAPE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SHAPE["vocab_size"] = 96
EXPERTS, INTERMEDIATE, HIDDEN = 8, 48, 64
MODELS = {
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SHAPE, num_experts=EXPERTS, num_experts_per_tok=2, moe_intermediate_size=INTERMEDIATE)
    ),
    "mixtral": lambda: MixtralForCausalLM(
        MixtralConfig(**SHAPE, num_local_experts=EXPERTS, intermediate_size=INTERMEDIATE)
    ),
    "gpt_oss": lambda: GptOssForCausalLM(
        GptOssConfig(**SHAPE, num_local_experts=EXPERTS, intermediate_size=INTERMEDIATE, num_experts_per_tok=2)
    ),
}
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
IDS = torch.arange(40).view(2, 20) * 7 % 96
KERNEL = {"preset": "eager", "moe_implementation": "grouped_mm"}


def adapted(model, seed=1, name="default", **settings):
    """``model`` under a new adapter; its routers and embeddings are trained, so that gradients pass through experts."""
    settings = {"r": 3, "lora_alpha": 5, "target_parameters": BOTH, "target_modules": []} | settings
    config = peft.LoraConfig(init_lora_weights=False, task_type="CAUSAL_LM", **settings)
    torch.manual_seed(seed)
    model = peft.get_peft_model(model, config, adapter_name=name)
    for path, parameter in model.named_parameters():
        if path.endswith(("embed_tokens.weight", "mlp.gate.weight", "mlp.router.weight")):
            parameter.requires_grad_()
    return model


def built(family):
    torch.manual_seed(0)
    return MODELS[family]().train()


def bound(family, when="before", **settings):
    """A bound model under an adapter, put on ``before`` or ``after`` bind; and its binding."""
    model = built(family)
    if when == "before":
        model = adapted(model, **settings)
    binding = bind(model, KERNEL, device="cpu")
    return (model if when == "before" else adapted(model, **settings)), binding


def step(model):
    model.zero_grad()
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return loss.detach(), {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def assert_equal(found, wanted, tolerance=2e-5):
    torch.testing.assert_close(found[0], wanted[0], rtol=tolerance, atol=tolerance)
    assert found[1].keys() == wanted[1].keys()
    for name, gradient in wanted[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=tolerance, atol=tolerance * gradient.abs().max())


def largest_allocation(call):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    events = profile.profiler.kineto_results.events()
    return max(event.nbytes() for event in events if event.name() == "[memory]")
