"""A small model of native sparse attention, as a third party would write it: compression and gates are its modules."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

SIZES = {"compress_length": 4, "compress_stride": 2, "block_size": 8, "block_count": 3}
SIZES |= {"first_blocks": 1, "last_blocks": 1, "window": 6}


class SparseConfig(PreTrainedConfig):
    model_type = "small_native_sparse"

    def __init__(self, hidden_size=32, num_hidden_layers=2, heads=6, key_heads=2, width=8, vocab_size=64, **kwargs):
        super().__init__(**kwargs)
        self.hidden_size, self.num_hidden_layers, self.vocab_size = hidden_size, num_hidden_layers, vocab_size
        self.heads, self.key_heads, self.width = heads, key_heads, width


def softmax(logits: Tensor, seen: Tensor) -> Tensor:
    weights = logits.masked_fill(~seen, torch.finfo(logits.dtype).min).softmax(-1)
    return weights * seen


def native_sparse_attention(
    query, key, value, compressed_key, compressed_value, gates, *, scaling=None, compress_length, compress_stride,
    block_size, block_count, first_blocks, last_blocks, window,
):  # fmt: skip
    """One head of keys at a time, over masks of all keys; scores of blocks by a matrix of overlaps."""
    tokens, repeats = query.shape[1], query.shape[2] // key.shape[2]
    scaling = query.shape[3] ** -0.5 if scaling is None else scaling
    place = torch.arange(tokens)
    starts = torch.arange(compressed_key.shape[1]) * compress_stride
    complete = starts + compress_length <= place[:, None] + 1
    blocks = torch.arange(-(-tokens // block_size))
    shared = torch.minimum(starts[:, None] + compress_length, (blocks + 1) * block_size)
    shared = (shared - torch.maximum(starts[:, None], blocks * block_size)).clamp_min(0) / compress_stride
    own = place[:, None] // block_size
    always = (blocks < first_blocks) | (own - blocks < last_blocks)
    causal, near = place <= place[:, None], place[:, None] - place < window
    outputs = []
    for head in range(key.shape[2]):
        queries = query[:, :, head * repeats : (head + 1) * repeats].transpose(1, 2)
        weights = softmax(queries @ compressed_key[:, None, :, head].mT * scaling, complete)
        scores = (weights.float().sum(1) @ shared).masked_fill(always, float("inf"))
        scores = scores.masked_fill(blocks > own, float("-inf"))
        best = scores.topk(min(block_count, len(blocks)))[1]
        is_chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True)
        seen = is_chosen.repeat_interleave(block_size, -1)[:, None, :, :tokens] & causal
        logits = queries @ key[:, None, :, head].mT * scaling
        parts = (
            weights @ compressed_value[:, None, :, head],
            softmax(logits, seen) @ value[:, None, :, head],
            softmax(logits, causal & near) @ value[:, None, :, head],
        )
        of_head = gates[:, :, head * repeats : (head + 1) * repeats].transpose(1, 2)
        outputs.append(sum(gate.unsqueeze(-1) * part for gate, part in zip(of_head.unbind(-1), parts, strict=True)))
    return torch.cat(outputs, 1).transpose(1, 2)


class Compression(nn.Module):
    """A key of the keys of some tokens: an MLP over them and where each is."""

    def __init__(self, width: int):
        super().__init__()
        self.places = nn.Parameter(torch.randn(SIZES["compress_length"], width) * 0.1)
        self.mlp = nn.Sequential(
            nn.Linear(SIZES["compress_length"] * width, 2 * width), nn.GELU(), nn.Linear(2 * width, width, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] < SIZES["compress_length"]:
            return x[:, :0]
        parts = x.unfold(1, SIZES["compress_length"], SIZES["compress_stride"])  # [B, C, G, D, length]
        return self.mlp((parts.mT + self.places).flatten(-2))


class SparseAttention(nn.Module):
    def __init__(self, config: SparseConfig):
        super().__init__()
        self.config, self.sizes = config, SIZES
        inner, of_keys = config.heads * config.width, config.key_heads * config.width
        self.q_proj, self.o_proj = nn.Linear(config.hidden_size, inner), nn.Linear(inner, config.hidden_size)
        self.k_proj, self.v_proj = nn.Linear(config.hidden_size, of_keys), nn.Linear(config.hidden_size, of_keys)
        self.gate_proj = nn.Linear(config.hidden_size, 3 * config.heads)
        self.compress_key, self.compress_value = Compression(config.width), Compression(config.width)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value, gates = (
            project(hidden).unflatten(-1, (heads, -1))
            for project, heads in (
                (self.q_proj, self.config.heads),
                (self.k_proj, self.config.key_heads),
                (self.v_proj, self.config.key_heads),
                (self.gate_proj, self.config.heads),
            )
        )
        compressed = self.compress_key(key), self.compress_value(value)
        output = native_sparse_attention(query, key, value, *compressed, gates.sigmoid(), **self.sizes)
        return self.o_proj(output.flatten(2))


class SparseModel(PreTrainedModel, GenerationMixin):
    config_class = SparseConfig

    def __init__(self, config: SparseConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(SparseAttention(config) for _ in range(config.num_hidden_layers))
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs) -> CausalLMOutputWithPast:
        hidden = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        logits = self.lm_head(hidden)
        loss = (
            None
            if labels is None
            else nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        )
        return CausalLMOutputWithPast(loss=loss, logits=logits)
