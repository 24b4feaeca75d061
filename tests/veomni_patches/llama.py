"""Llama with five slots, as VeOmni's own smallest patches have it."""

import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast, SequenceClassifierOutputWithPast
from transformers.models.llama.modeling_llama import rotate_half

from veomni_core import OpSlot
from veomni_patchgen import PatchConfig

config = PatchConfig(
    source_module="transformers.models.llama.modeling_llama",
    target_file="patched_modeling_llama_gpu.py",
    description="Llama whose norm, MLP, rotation and losses are slots",
)

rms_norm = OpSlot("rms_norm", "standard")
swiglu_mlp = OpSlot("swiglu_mlp", "standard")
rotary_pos_emb = OpSlot("rotary_pos_emb", "full")
causal_loss = OpSlot("cross_entropy_loss", "causal")
seq_cls_loss = OpSlot("cross_entropy_loss", "seq_cls")


@config.override_method("LlamaRMSNorm.forward", description="the slot's kernel, where there is one")
def norm_forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
    if rms_norm.use_non_eager_impl:
        return rms_norm(hidden_states, self.weight, self.variance_epsilon)
    input_dtype = hidden_states.dtype
    hidden_states = hidden_states.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
    return self.weight * hidden_states.to(input_dtype)


@config.override_method("LlamaMLP.forward", description="gate and up as one op")
def mlp_forward(self, x):
    gate, up = self.gate_proj(x), self.up_proj(x)
    return self.down_proj(swiglu_mlp(gate, up) if swiglu_mlp.use_non_eager_impl else self.act_fn(gate) * up)


@config.replace_function("apply_rotary_pos_emb", description="the slot's kernel, where there is one")
def rotary(q, k, cos, sin, unsqueeze_dim=1):
    if rotary_pos_emb.use_non_eager_impl:
        return rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


@config.modify_method("LlamaForCausalLM.forward", description="the loss without the logits of all words")
def causal_forward(original_forward, self, *args, labels=None, **kwargs):
    if labels is None or not causal_loss.use_non_eager_impl:
        return original_forward(self, *args, labels=labels, **kwargs)
    outputs = self.model(*args, **kwargs)
    hidden = outputs.last_hidden_state
    shifted = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]
    loss = causal_loss(hidden.flatten(0, 1), self.lm_head.weight, shifted.flatten())
    return CausalLMOutputWithPast(loss=loss, **others(outputs))


def others(outputs):
    """What is passed on, by names of which 5.24 has changed one (past_key_values, cache)."""
    return {name: value for name, value in outputs.items() if name not in ("loss", "last_hidden_state")}


# Upstream's class has no body: `class LlamaForSequenceClassification(...): ...`.
@config.override_method("LlamaForSequenceClassification.forward", description="the slot's loss")
def classified(self, input_ids=None, labels=None, **kwargs):
    found = super().forward(input_ids, **kwargs)
    loss = None
    if labels is not None and seq_cls_loss.use_non_eager_impl:
        loss = seq_cls_loss(found.logits, labels)
    elif labels is not None:
        loss = nn.functional.cross_entropy(found.logits, labels)
    return SequenceClassifierOutputWithPast(loss=loss, **others(found))


@config.example
def tiny():
    """A model of two layers, and a step of it."""
    ids = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(0))
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    return {"model_type": "llama", "num_attention_heads": 4, **sizes}, {"input_ids": ids, "labels": ids}
