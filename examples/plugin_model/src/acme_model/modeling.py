"""A decoder whose layers add attention and MLP of one norm: ``x + attention(norm(x)) + mlp(norm(x))``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, LlamaConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRMSNorm, LlamaRotaryEmbedding

PARALLEL_PLAN = {
    "tp": {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
    }
}


class AcmeParallelConfig(LlamaConfig):
    model_type = "acme_parallel"


class AcmeMLP(nn.Module):
    def __init__(self, config: AcmeParallelConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        gate, up = self.gate_up(hidden_states).chunk(2, dim=-1)
        return self.down(nn.functional.silu(gate) * up)  # type: ignore[no-any-return]


class AcmeLayer(nn.Module):
    def __init__(self, config: AcmeParallelConfig, index: int) -> None:
        super().__init__()
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = LlamaAttention(config, index)
        self.mlp = AcmeMLP(config)

    def forward(self, hidden_states: Tensor, **options: Any) -> Tensor:
        normed = self.norm(hidden_states)
        attended, _ = self.self_attn(normed, **options)
        return hidden_states + attended + self.mlp(normed)  # type: ignore[no-any-return]


class AcmeParallelModel(PreTrainedModel):
    config_class = AcmeParallelConfig
    base_model_prefix = "model"
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(self, config: AcmeParallelConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(AcmeLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None, **_: Any
    ) -> BaseModelOutputWithPast:
        hidden_states = self.embed_tokens(input_ids)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).unsqueeze(0)
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=hidden_states,
            attention_mask=attention_mask,
            past_key_values=None,
            position_ids=position_ids,
        )
        angles = self.rotary_emb(hidden_states, position_ids)
        for layer in self.layers:
            hidden_states = layer(hidden_states, attention_mask=mask, position_embeddings=angles)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states))


class AcmeParallelForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = AcmeParallelConfig
    base_model_prefix = "model"
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(self, config: AcmeParallelConfig) -> None:
        super().__init__(config)
        self.model = AcmeParallelModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        **options: Any,
    ) -> CausalLMOutputWithPast:
        outputs = self.model(input_ids, attention_mask, position_ids, **options)
        logits = self.lm_head(outputs.last_hidden_state)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **options)
        return CausalLMOutputWithPast(loss=loss, logits=logits)
