"""Compiled steps of bound models get masks only where rows are packed or padded, or a window hides keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import create_causal_mask
from transformers.models.llama.modeling_llama import LlamaModel

from veomni_core import bind

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 67,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
_OPS = {"preset": "auto", "attn_implementation": "sdpa"}


@pytest.fixture(autouse=True)
def _graphs_of_one_test() -> None:
    torch.compiler.reset()  # the forwards of all models share their code, of which torch keeps eight graphs


def _model(family: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **_SIZES, **settings)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()


def _step(model: Any, ids: Tensor, **given: Any) -> list[Tensor]:
    """The loss and the gradients of all parameters."""
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids, use_cache=False, **given).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


class _Backend:
    """Runs graphs as they are, and keeps whether each attention in them had a mask."""

    def __init__(self) -> None:
        self.masked: list[bool] = []

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        calls = [node for node in graph.graph.nodes if "scaled_dot_product" in str(node.target)]
        self.masked += [node.kwargs.get("attn_mask") is not None for node in calls]
        return graph  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("family", "settings", "length", "masked"),
    [
        pytest.param("llama", {}, 12, [False, False], marks=pytest.mark.thorough),
        pytest.param("smollm3", {}, 12, [False, False], marks=pytest.mark.thorough),
        # A window of one layer of two that hides keys, and that hides none.
        ("qwen2", _WINDOW, 12, [False, True]),
        pytest.param("qwen2", _WINDOW, 7, [False, False], marks=pytest.mark.thorough),
    ],
)
def test_masks_of_plain_and_of_packed_rows(family: str, settings: Any, length: int, masked: list[bool]) -> None:
    model = _model(family, **settings)
    ids = torch.randint(2, 67, (2, length))
    packed = {"position_ids": torch.cat([torch.arange(3), torch.arange(length - 3)]).expand(2, -1)}
    padded = {"attention_mask": torch.ones(2, length, dtype=torch.long).index_fill(1, torch.tensor([length - 1]), 0)}
    wanted = [_step(model, ids, **given) for given in ({}, packed, padded)]
    bind(model, _OPS)
    backend = _Backend()
    model.compile(backend=backend, fullgraph=True)
    for given, masks, eager in zip(({}, packed, padded), (masked, [True] * 2, [True] * 2), wanted, strict=True):
        backend.masked.clear()
        torch.testing.assert_close(_step(model, ids, **given), eager, rtol=1e-4, atol=1e-5)
        assert backend.masked == masks


def test_no_layer_runs_while_kernels_are_bound() -> None:
    """Qwen3 builds no sliding mask here; a search for one that went on to layers would start FSDP2 in them."""
    model, ran = _model("qwen3", head_dim=8), []
    for module in model.modules():
        module.register_forward_pre_hook(lambda module, _: ran.append(type(module).__name__))
    bind(model, _OPS)
    assert not ran


class _NamesNoArgument(LlamaModel):
    """Builds its mask by a call without keywords, as code of one's own may."""

    def forward(self, input_ids: Any = None, inputs_embeds: Any = None, **given: Any) -> Any:
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        mask = create_causal_mask(self.config, hidden, None, past_key_values=None)
        return super().forward(inputs_embeds=hidden, attention_mask=mask, use_cache=False)


class _NumbersFromTheEnd(LlamaModel):
    """Passes positions that fall, which transformers takes for packed rows, to the builder of its mask."""

    def forward(self, input_ids: Any = None, inputs_embeds: Any = None, position_ids: Any = None, **given: Any) -> Any:
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        positions = torch.arange(hidden.shape[1], device=hidden.device).flip(0)[None]
        tokens = {"config": self.config, "inputs_embeds": hidden, "attention_mask": None, "past_key_values": None}
        mask = create_causal_mask(**tokens, position_ids=positions)
        return super().forward(inputs_embeds=hidden, attention_mask=mask, use_cache=False)


@pytest.mark.parametrize("decoder", [_NumbersFromTheEnd, _NamesNoArgument])
def test_a_decoder_of_which_it_is_not_proven_keeps_its_masks(decoder: type[LlamaModel]) -> None:
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(**_SIZES, attn_implementation="sdpa")).train()
    model.model.__class__ = decoder
    ids = torch.randint(2, 67, (2, 9))
    wanted = _step(model, ids)
    bind(model, _OPS)
    backend = _Backend()
    model.compile(backend=backend)
    torch.testing.assert_close(_step(model, ids), wanted, rtol=1e-4, atol=1e-5)
    assert backend.masked == [True, True]
