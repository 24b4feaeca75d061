"""Functions that look like a rotary embedding and compute something else: none may be bound as what it isn't."""

from __future__ import annotations

import inspect

import pytest
import torch
from lookalikes import sites, variants
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama import modeling_llama


def attention_with(rotary) -> nn.Module:
    """A Llama layer whose attention calls ``rotary`` instead of the family's function."""
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1)
    config._attn_implementation = "eager"
    namespace = {**vars(modeling_llama), "apply_rotary_pos_emb": rotary}
    plain = inspect.unwrap(modeling_llama.LlamaAttention.forward)  # transformers 5.24 decorates it
    forward = type(plain)(plain.__code__, namespace, plain.__name__, plain.__defaults__, plain.__closure__)
    forward.__kwdefaults__ = plain.__kwdefaults__
    kind = type("Attention", (modeling_llama.LlamaAttention,), {"forward": forward})
    return nn.ModuleList([kind(config, 0), modeling_llama.LlamaRotaryEmbedding(config)])


def rotated(q, k, cos, sin, turn):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + turn(q) * sin, k * cos + turn(k) * sin


def llama_rotary(q, k, cos, sin, unsqueeze_dim=1):
    return modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)


def of_first_half(q, k, cos, sin, unsqueeze_dim=1):
    """Llama's wherever both halves are the same, as Llama's embedding makes them."""
    first = (torch.cat((x.chunk(2, dim=-1)[0],) * 2, dim=-1) for x in (cos, sin))
    return llama_rotary(q, k, *first)


def in_low_precision_unturned(q, k, cos, sin, unsqueeze_dim=1):
    return llama_rotary(q, k, cos, sin) if q.dtype == torch.float32 else (q.clone(), k.clone())


def widening(q, k, cos, sin, unsqueeze_dim=1):
    return tuple(x.float() for x in llama_rotary(q, k, cos, sin))


def of_complex(q, k, cos, sin, unsqueeze_dim=1):
    turn = torch.polar(torch.ones_like(cos[..., ::2].float()), sin[..., ::2].float()).unsqueeze(1)
    both = (torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) * turn for x in (q, k))
    return tuple(torch.view_as_real(x).flatten(-2).to(q.dtype) for x in both)


# What each is found to be; None is refused. A regular one that isn't Llama's has its own name.
ROTARIES = {
    "sign flipped": (
        lambda q, k, cos, sin, unsqueeze_dim=1: rotated(q, k, cos, sin, lambda x: -modeling_llama.rotate_half(x)),
        "sign_flipped",
    ),
    # Llama's embedding hands over halves that are the same, not the neighbours that this one needs.
    "pairs of neighbours": (
        lambda q, k, cos, sin, unsqueeze_dim=1: rotated(
            q, k, cos, sin, lambda x: torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
        ),
        None,
    ),
    "queries alone": (lambda q, k, cos, sin, unsqueeze_dim=1: (llama_rotary(q, k, cos, sin)[0], k), None),
    "queries alone flipped": (
        lambda q, k, cos, sin, unsqueeze_dim=1: (llama_rotary(q, k, cos, sin)[0], llama_rotary(q, k, cos, -sin)[1]),
        None,
    ),
    "scaled": (lambda q, k, cos, sin, unsqueeze_dim=1: llama_rotary(q * 1.01, k, cos, sin), None),
    "cos and sin swapped": (lambda q, k, cos, sin, unsqueeze_dim=1: llama_rotary(q, k, sin, cos), None),
    "keys and queries swapped": (
        lambda q, k, cos, sin, unsqueeze_dim=1: llama_rotary(q, k, cos, sin)[::-1],
        None,
    ),
    "stops the gradient": (
        lambda q, k, cos, sin, unsqueeze_dim=1: (llama_rotary(q, k, cos, sin)[0].detach(), k),
        None,
    ),
    "of the first half": (of_first_half, "full"),
    "another function in bfloat16": (in_low_precision_unturned, None),
    "gives float32": (widening, None),
    "complex": (of_complex, None),
}


@pytest.mark.parametrize("name", ROTARIES)
def test_rotary_functions(name):
    assert variants("rotary_pos_emb", attention_with(modeling_llama.apply_rotary_pos_emb)) == ["full"]
    function, variant = ROTARIES[name]
    assert variants("rotary_pos_emb", attention_with(function)) == [variant]


class DiffersFarOut(modeling_llama.LlamaRotaryEmbedding):
    """Its halves are the same near the start of a sequence only."""

    def forward(self, x, position_ids):
        cos, sin = super().forward(x, position_ids)
        half = cos.shape[-1] // 2
        far = (position_ids > 3000).unsqueeze(-1)
        return torch.cat((cos[..., :half], torch.where(far, 0.5, 1.0).to(cos) * cos[..., half:]), dim=-1), sin


class DiffersInLongBatches(modeling_llama.LlamaRotaryEmbedding):
    def forward(self, x, position_ids):
        cos, sin = super().forward(x, position_ids)
        return (cos.flip(-1), sin) if position_ids.shape[1] > 5000 else (cos, sin)


@pytest.mark.parametrize(
    "kind, reason",
    [
        (DiffersFarOut, "laid out in another way at positions up to"),
        (DiffersInLongBatches, "DiffersInLongBatches.forward chooses by shape"),
    ],
)
def test_an_embedding_is_seen_far_beyond_the_start(kind, reason):
    model = attention_with(modeling_llama.apply_rotary_pos_emb)
    model[1] = kind(model[0].config)
    (site,) = sites("rotary_pos_emb", model)
    assert site.variant is None
    assert reason in site.evidence


def test_a_function_is_proven_only_where_each_of_its_branches_ran():
    def long_ones_differ(q, k, cos, sin, unsqueeze_dim=1):
        return llama_rotary(q, k, cos, sin) if q.shape[2] < 4096 else (q, k)

    (site,) = sites("rotary_pos_emb", attention_with(long_ones_differ))
    assert site.variant is None
    assert "chooses by shape" in site.evidence
