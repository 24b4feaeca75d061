"""Ring attention over ranks, alone and around Ulysses: loss, logits and every gradient are those of one rank."""

from __future__ import annotations

import functools
from typing import Any

import torch
import ulysses_hybrids
import ulysses_models
from torch import distributed
from ulysses_models import LENGTH, causal_batch, grads_equal_as_wholes, packed_positions, registry
from ulysses_ranks import check, close, raises, rank, size

from models import build, tokens
from veomni_core import bind
from veomni_core.errors import BindingError, ConfigError, HostError
from veomni_ops.attention import AttentionModule, standard
from veomni_ops.attention_blocks import TORCH
from veomni_transformers.sequence import apply_context_parallel
from veomni_transformers.sequence.order import Order
from veomni_transformers.sequence.ring import Documents, ring_attention

WINDOWS = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}


@functools.cache
def neighbours() -> Any:
    """This rank and its neighbour, of four."""
    groups = [distributed.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    return groups[rank() // 2]


def ways() -> list[Any]:
    """A ring of all ranks; with four, also one of two slots of two ranks."""
    both = functools.partial(apply_context_parallel, sp_group=neighbours()) if size() == 4 else None
    return [apply_context_parallel, *([both] if both else [])]


def compare(family: str, batch: dict[str, Any], *args: Any, **config: Any) -> None:
    for apply in ways():
        ulysses_models.compare(family, batch, *args, apply=apply, **config)


def compare_hybrid(family: str, names: tuple[str, ...] = (), **config: Any) -> None:
    for apply in ways():
        ulysses_hybrids.compare(family, names, apply=apply, **config)


@check
def a_ring_computes_windows_softcaps_sinks_and_packed_rows() -> None:
    """Against the contract's reference, output and gradients; sequences end anywhere, and windows of any length."""
    order = Order(distributed.group.WORLD, None, size())
    for number, (window, softcap, begins) in enumerate(
        (
            (None, None, [(0,)]),
            (None, 2.0, [(0, 5, 6, 9), (0, 8)]),
            (1, None, [(0,), (0, 3)]),
            (3, None, [(0, 1, 2, 12), (0,)]),
            (7, 2.0, [(0,)]),
            (11, None, [(0, 2)]),
        )
    ):
        torch.manual_seed(number)
        rows = max(len(begins), 2)
        whole = [torch.randn(rows, heads, LENGTH, 8, dtype=torch.float64) for heads in (6, 3, 3)]
        whole = [*whole, torch.randn(6, dtype=torch.float64)]
        upstream = torch.randn(rows, LENGTH, 6, 8, dtype=torch.float64)
        mine, one = ([each.clone().requires_grad_() for each in whole] for _ in range(2))
        place = torch.arange(LENGTH)
        starts = torch.stack([torch.tensor(each).view(-1, 1).le(place).sum(0) for each in begins])
        seen = (place.view(-1, 1) >= place) & (starts[:, :, None] == starts[:, None, :])
        if window is not None:
            seen &= place.view(-1, 1) - place < window
        options = {"softcap": softcap, "scaling": 0.3}
        wanted, _ = standard(AttentionModule(2), *one[:3], seen[:, None], s_aux=one[3], **options)
        attend = ring_attention(TORCH, order)
        documents = Documents(tuple(begins)) if begins != [(0,)] else None
        heads = [order.part(each, 2) for each in mine[:3]]
        found, _ = attend(AttentionModule(2), *heads, documents, s_aux=mine[3], sliding_window=window, **options)
        close(order.whole(found, 1), wanted, f"output {number}")
        wanted.backward(upstream)
        found.backward(order.part(upstream, 1))
        for name, own, each in zip(("query", "key", "value", "sinks"), mine, one, strict=True):
            distributed.all_reduce(own.grad)
            close(own.grad, each.grad, f"{name} {number}")
    heads = [torch.randn(1, 4, LENGTH, 8) for _ in range(3)]
    with torch.autocast("cpu", torch.bfloat16):
        under = attend(AttentionModule(1), *heads, None)[0]
    assert torch.equal(under, attend(AttentionModule(1), *(each.bfloat16() for each in heads), None)[0])


@check
def a_ring_trains_a_llama_as_one_rank_does() -> None:
    heads = {"hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 1}  # which no number of ranks divides
    ulysses_models.compare("llama", causal_batch(), apply=apply_context_parallel, **heads)
    compare("llama", {**causal_batch(1), "position_ids": packed_positions()})
    for name, batch in ulysses_hybrids.batches().items():
        if name == "padded":
            batch["labels"][0, 3] = -100
        compare("llama", batch)


@check
def a_ring_skips_what_windows_do_not_see() -> None:
    compare("gemma3_text", causal_batch(), **WINDOWS)
    compare("gemma3_text", {**causal_batch(1), "position_ids": packed_positions()}, **WINDOWS)
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5}
    ops = {"preset": "eager", "attn_implementation": "by_blocks"}
    compare("gpt_oss", causal_batch(), ops, attn_implementation="eager", **experts)


@check
def a_ring_with_packed_hybrids() -> None:
    compare_hybrid("falcon_h1", ("packed", "padded"))
    compare_hybrid("qwen3_next", ("packed rows",), router_aux_loss_coef=1.0)


@check
def a_ring_with_hybrids_in_every_form() -> None:
    for family in ("qwen3_next", "falcon_h1", "kimi_linear", "bamba", "lfm2"):
        compare_hybrid(family)


@check
def a_ring_with_heads_that_overlap() -> None:
    if size() == 4:
        ulysses_models.compare("llama", causal_batch(), apply=ways()[1], overlap=True)


@check
def layers_of_a_ring_are_computed_again_in_backward() -> None:
    reference, model = (build("gemma3_text", dtype=torch.float64, attn_implementation="sdpa") for _ in range(2))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    apply_context_parallel(model)
    packed = {**causal_batch(1), "position_ids": packed_positions()}
    for each in (reference, model):  # both forwards run before the first backward
        sum(each(**batch, use_cache=False).loss for batch in (packed, causal_batch())).backward()
    grads_equal_as_wholes(model, reference)


@check
def what_a_ring_would_compute_wrongly_is_refused() -> None:
    model = build("llama", attn_implementation="sdpa")
    applied = apply_context_parallel(model)
    assert applied.describe() == f"ring, cp={size()}, over sdpa"
    ids = tokens(2, LENGTH)
    said = f"a sequence of {LENGTH - size()} can't be split over {size()} sequence-parallel ranks. Pad the batch to a"
    raises(ConfigError, f"{said} multiple of {2 * size()}", lambda: model(tokens(2, LENGTH - size())))
    raises(ConfigError, "keeps no cache", lambda: model(ids, use_cache=True))
    kept = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().expand(2, 1, -1, -1)
    raises(ConfigError, "takes padding [batch, positions] and packed", lambda: model(ids, attention_mask=kept))
    holes = torch.ones_like(ids)
    holes[1, 3] = 0
    raises(ConfigError, "not between them", lambda: model(ids, attention_mask=holes))
    raises(ConfigError, "a token at padding has a label", lambda: model(ids, attention_mask=holes, labels=ids))
    raises(BindingError, "already", lambda: apply_context_parallel(model))
    applied.undo()
    for module in model.modules():
        module.is_causal = False
    raises(ConfigError, "causal masks with windows alone, and", lambda: apply_context_parallel(model))
    raises(ConfigError, "this model's attention is not", lambda: attend_both_ways())
    raises(ConfigError, "overlap is for", lambda: apply_context_parallel(model, overlap=True))
    raises(
        ConfigError,
        "its attention is eager",
        lambda: apply_context_parallel(build("llama", attn_implementation="eager")),
    )
    without = build("llama", attn_implementation="sdpa")
    bind(without, {"preset": "eager", "attn_implementation": "by_lengths"}, registry=registry())
    raises(ConfigError, "gives no log-sum-exp", lambda: apply_context_parallel(without))
    if size() == 4:
        others = [distributed.new_group(ranks) for ranks in ([0, 2], [1, 3])]
        apart = functools.partial(apply_context_parallel, model, sp_group=others[rank() % 2])
        raises(ConfigError, "give it neighbours of group's [0, 1, 2, 3]", apart)


def attend_both_ways() -> None:
    heads = torch.zeros(1, 2, 4, 8)
    attend = ring_attention(TORCH, Order(distributed.group.WORLD, None, size()))
    attend(AttentionModule(1), heads, heads, heads, None, is_causal=False)


@check
def ranks_of_a_ring_are_given_one_batch() -> None:
    model = build("llama", attn_implementation="sdpa")
    apply_context_parallel(model)
    raises(HostError, "they differ in input_ids", lambda: model(tokens(2, LENGTH + 2 * size() * rank())))
