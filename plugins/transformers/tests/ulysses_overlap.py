"""Exchanges that run while the attention computes its other projections."""

from __future__ import annotations

import copy

import torch
from tiny_multimodal import tiny_model
from torch import distributed
from ulysses_models import causal_batch, compare, grads_equal_as_wholes, packed_positions
from ulysses_multimodal import equal_to_one_process, mixed_batch
from ulysses_ranks import check, raises, size

from models import EVERY_KERNEL, build
from veomni_core.errors import ConfigError
from veomni_transformers.sequence import apply_ulysses, overlap


@check
def overlapping_exchanges_change_no_bit_of_a_loss() -> None:
    for family in ("llama", "qwen3", "gemma3_text"):
        one, other = (build(family, attn_implementation="sdpa") for _ in range(2))
        apply_ulysses(one)
        apply_ulysses(other, overlap=True)
        found, wanted = (each(**causal_batch()) for each in (other, one))
        assert torch.equal(found.logits, wanted.logits) and torch.equal(found.loss, wanted.loss)
        for each in (found, wanted):
            each.loss.backward()
        for (name, mine), theirs in zip(other.named_parameters(), one.parameters(), strict=True):
            for gradient in (mine.grad, theirs.grad):  # a norm of heads sees others of them on each rank
                distributed.all_reduce(gradient)
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-7, msg=name)


@check
def overlapping_exchanges_of_every_kind_of_attention() -> None:
    batch = causal_batch()
    compare("llama", causal_batch(1), overlap=True, num_key_value_heads=1)
    compare("qwen3_moe", batch, overlap=True)  # norms of heads
    compare("glm4", batch, overlap=True)  # rotates a part of each head
    compare("cohere2", batch, overlap=True)  # layers without positions
    compare("gemma3_text", batch, overlap=True, sliding_window=5, layer_types=["sliding_attention", "full_attention"])
    compare("llama", {**causal_batch(1), "position_ids": packed_positions()}, overlap=True)
    bound = {**EVERY_KERNEL, "attn_implementation": "sdpa"}
    compare("qwen3_moe", batch, bound, torch.float32, overlap=True)
    by_lengths = {"preset": "eager", "attn_implementation": "by_lengths"}
    compare("llama", {**causal_batch(1), "position_ids": packed_positions()}, by_lengths, overlap=True)
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5}
    compare("gpt_oss", batch, by_lengths, overlap=True, attn_implementation="eager", **experts)  # sinks


@check
def overlapping_exchanges_in_a_decoder_of_pictures() -> None:
    for family in ("qwen2_5_vl", "qwen3_vl"):
        equal_to_one_process(family, mixed_batch(tiny_model(family)), overlap=True)


@check
def exchanges_are_under_way_while_others_are_projected() -> None:
    """In forward before the next projection, and in backward before the first gradient of one is computed."""
    model, seen = build("llama", attn_implementation="sdpa", num_hidden_layers=1), []
    apply_ulysses(model, overlap=True)
    attention = model.model.layers[0].self_attn
    for name in ("q_proj", "k_proj", "v_proj"):
        projection = getattr(attention, name)
        projection.register_forward_hook(lambda *_, name=name: seen.append(name))
        projection.weight.register_hook(lambda _, name=name: seen.append(name))
    launch, waited = overlap._launch, overlap._waited

    def noted(name: str, function):
        return lambda *args: (seen.append(name), function(*args))[1]

    overlap._launch, overlap._waited = noted("launch", launch), noted("wait", waited)
    try:
        loss = model(**causal_batch()).loss
        assert seen == ["q_proj", "launch", "k_proj", "launch", "v_proj", "launch", *["wait"] * 3], seen
        seen.clear()
        loss.backward()
        assert seen == [*["launch"] * 3, "wait", "v_proj", "wait", "k_proj", "wait", "q_proj"], seen
    finally:
        overlap._launch, overlap._waited = launch, waited


@check
def overlapping_exchanges_are_computed_again_in_backward_and_copied_and_undone() -> None:
    reference, model = (build("qwen3", dtype=torch.float64, attn_implementation="sdpa") for _ in range(2))
    classes = [type(module) for module in model.modules()]
    model.gradient_checkpointing_enable({"use_reentrant": False})
    applied = apply_ulysses(model, overlap=True)
    twin, batch = copy.deepcopy(model), causal_batch()
    for each in (reference, twin, model):
        each(**batch, use_cache=False).loss.backward()
    grads_equal_as_wholes(model, reference)
    grads_equal_as_wholes(twin, reference)
    applied.undo()
    assert [type(module) for module in model.modules()] == classes
    assert model(**batch).logits.shape[1] == size() * twin(**batch).logits.shape[1]


@check
def overlapping_exchanges_compile_as_one_graph() -> None:
    model, batch = build("llama", attn_implementation="sdpa", num_hidden_layers=1), causal_batch()
    apply_ulysses(model, overlap=True)
    wanted = model(**batch).loss
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**batch).loss, wanted)


@check
def attention_whose_exchanges_cannot_overlap_is_refused() -> None:
    for family, text in (
        ("phi3", "(Phi3Attention) can't overlap with its projections: it has no linear projections q_proj"),
        ("olmo2", "(Olmo2Attention) can't overlap with its projections: its forward does not run on some of its heads"),
    ):
        model = build(family, attn_implementation="sdpa")
        raises(ConfigError, text, lambda model=model: apply_ulysses(model, overlap=True))
    model = build("llama", attn_implementation="sdpa", num_hidden_layers=1)
    attention = model.model.layers[0].self_attn
    own = type(attention).forward

    class Gated(type(attention)):
        """Reads its hidden states beside its projections."""

        def forward(self, hidden_states, *args, **kwargs):
            output, weights = own(self, hidden_states, *args, **kwargs)
            return output * hidden_states.mean(-1, keepdim=True), weights

    attention.__class__ = Gated
    raises(ConfigError, "(Gated) can't overlap", lambda: apply_ulysses(model, overlap=True))
    apply_ulysses(model).undo()
