"""Whole models over ranks: loss, logits and gradients are those of one rank."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import distributed
from ulysses_ranks import check, close, size

from counting_kernels import calls, counting_registry
from models import EVERY_KERNEL, build, tokens
from planned_norms import vouching
from veomni_conformance.given_kernels import definitions
from veomni_core import KernelSpec, bind
from veomni_core.discovery.registry import Registry, build_registry
from veomni_ops.attention import standard
from veomni_ops.attention_blocks import TORCH
from veomni_transformers.sequence import apply_ulysses, scatter_attention_heads, slice_input_tensor

LENGTH = 16
# Grouped matrix products know no float64.
KERNELS = {"attn_implementation": "sdpa", "experts_implementation": "eager"}


def by_lengths(*args: Any, **kwargs: Any) -> Any:
    """The contract's reference, given lengths and padding as a FlashAttention is, and no mask."""
    assert args[4] is None or args[4].dim() == 2
    return standard(*args, **kwargs)


def by_blocks(*args: Any, **kwargs: Any) -> Any:
    """The same, with what ring attention needs."""
    return by_lengths(*args, **kwargs)


by_blocks.blocks = TORCH  # type: ignore[attr-defined]


def registry() -> Registry:
    """The counting kernels, transformers' sdpa, and kernels that take lengths."""
    kernels = {
        "sdpa": ("transformers.integrations.sdpa_attention:sdpa_attention_forward", "sdpa_mask"),
        "by_lengths": (f"{__name__}:by_lengths", "flash_attention_mask"),
        "by_blocks": (f"{__name__}:by_blocks", "flash_attention_mask"),
    }
    features = ("dense_mask", "padding_mask", "sliding_window", "packed", "sinks")
    attention = (
        KernelSpec(name, "attention", "standard", factory, features=(*features, mask))
        for name, (factory, mask) in kernels.items()
    )
    counting = next(plugin for plugin in counting_registry("one").plugins if plugin.kernels)
    both = (*counting.kernels, *attention)
    found = build_registry([*definitions(), dataclasses.replace(counting, kernels=both)], {})
    return vouching(found, *both, distribution=counting.distribution)


def compare(
    family: str,
    batch: dict[str, Any],
    ops: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float64,
    like: dict[str, Any] | None = None,
    overlap: bool = False,
    apply: Any = apply_ulysses,
    **config: Any,
) -> None:
    """Loss, auxiliary loss, logits and the mean of the ranks' gradients are those of one rank.

    ``like`` is the batch for the ranks where it is written otherwise than for one; ``apply`` divides sequences.
    """
    config = {**KERNELS, **config}
    reference, model = (build(family, dtype=dtype, **config) for _ in range(2))
    if ops:
        # Kernels declare no float64, so that none is bound in it; these compute in any dtype.
        bind(model.float(), ops, registry=registry())
        model.to(dtype).load_state_dict(reference.state_dict())
    wanted = reference(**batch, use_cache=False)
    wanted.loss.backward()
    with apply(model, overlap=overlap) as applied:
        assert f"p={size()}" in applied.describe() or apply is not apply_ulysses
        assert ("overlapping" in applied.describe()) == overlap
        found = model(**(like or batch))
        found.loss.backward()
    torch.testing.assert_close(
        found.loss, wanted.loss, rtol=1e-6, atol=0, check_dtype=False
    )  # transformers takes it in float32
    if getattr(wanted, "aux_loss", None) is not None:
        torch.testing.assert_close(found.aux_loss, wanted.aux_loss, rtol=1e-6, atol=0, check_dtype=False)
    if not ops:
        mask = batch.get("attention_mask")
        kept = mask.bool() if mask is not None and mask.dim() == 2 else torch.ones(wanted.logits.shape[:2]).bool()
        close(applied.gather_outputs(found.logits, 1)[kept], wanted.logits[kept], "logits")
    (grads_equal_as_wholes if overlap else grads_equal)(model, reference)


def grads_equal_as_wholes(model: torch.nn.Module, reference: torch.nn.Module) -> None:
    """To 1e-6 of each gradient's norm: norms, routers and the loss compute in float32 whatever the model's dtype.

    Where ranks share a key head, the sum over its copies is taken behind its norm and rotation, and not before them.
    """
    own = dict(model.named_parameters())
    for name, parameter in reference.named_parameters():
        if parameter.grad is not None:
            mine = torch.zeros_like(parameter) if own[name].grad is None else own[name].grad
            distributed.all_reduce(mine)
            off, norm = (mine / size() - parameter.grad).norm(), parameter.grad.norm()
            assert off <= 1e-6 * norm + (1e-9 if mine.dtype == torch.float64 else 1e-7), (name, off, norm)


def grads_equal(model: torch.nn.Module, reference: torch.nn.Module) -> None:
    mine = dict(model.named_parameters())
    for name, parameter in reference.named_parameters():
        if parameter.grad is None:
            continue
        gradient = mine[name].grad if mine[name].grad is not None else torch.zeros_like(mine[name])
        distributed.all_reduce(gradient)
        close(gradient / size(), parameter.grad, name)


def packed_positions() -> torch.Tensor:
    """Of four sequences in one row, none of which ends where a rank's part does."""
    return torch.cat([torch.arange(length) for length in (5, 1, 3, 7)])[None]


def causal_batch(batch: int = 2, seed: int = 1) -> dict[str, Any]:
    ids = tokens(batch, LENGTH, seed)
    labels = ids.clone()
    labels[0, LENGTH // 2 - 2 : LENGTH // 2 + 1] = -100  # across the border of two parts
    return {"input_ids": ids, "labels": labels}


@check
def llama_with_as_many_key_heads_as_ranks_or_fewer() -> None:
    compare("llama", causal_batch(), num_key_value_heads=4)
    compare("llama", causal_batch(1), num_key_value_heads=1)


@check
def labels_on_one_rank_alone_and_a_given_count_of_items() -> None:
    batch = causal_batch()
    batch["labels"][:, 3:] = -100
    compare("llama", {**batch, "num_items_in_batch": torch.tensor(7)})


@check
def padded_batches() -> None:
    batch = causal_batch()
    mask = torch.ones_like(batch["input_ids"])
    mask[1, LENGTH - 5 :] = 0
    batch["labels"][1, LENGTH - 5 :] = -100
    compare("llama", {**batch, "attention_mask": mask})
    compare("qwen3_moe", {**batch, "attention_mask": mask})


@check
def packed_sequences_by_their_positions() -> None:
    compare("llama", {**causal_batch(1), "position_ids": packed_positions()})


@check
def masks_of_queries_and_keys() -> None:
    batch = causal_batch()
    kept = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    kept[LENGTH // 2 :, 1:4] = False
    compare("llama", {**batch, "attention_mask": kept.expand(2, 1, -1, -1)})
    compare("llama", {**batch, "attention_mask": kept.repeat(2, 4, 1, 1)})  # one for each head


@check
def labels_that_are_shifted_already() -> None:
    batch = causal_batch()
    batch["shift_labels"] = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    compare("llama", batch)


@check
def embeddings_instead_of_tokens() -> None:
    batch = causal_batch()
    ids = batch.pop("input_ids")
    table = torch.randn(64, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    compare("llama", {**batch, "inputs_embeds": table[ids]})


@check
def heads_of_several_dtypes_have_those_of_queries() -> None:
    for dtypes in ((torch.float32, torch.bfloat16, torch.bfloat16), (torch.float16, torch.bfloat16, torch.float32)):
        for width in (3, 4, 8):
            whole = [torch.randn(2, 2 * size(), 3 * size(), width).to(dtype) for dtype in dtypes]
            found = scatter_attention_heads(*(slice_input_tensor(each, 2) for each in whole))
            for mine, each in zip(found, whole, strict=True):
                assert mine.equal(slice_input_tensor(each, 1).to(dtypes[0])), (dtypes, width)


@check
def weights_in_float32_under_autocast() -> None:
    batch = causal_batch()
    for head_dim in (4, 8):
        reference, model = (build("qwen3", head_dim=head_dim, num_key_value_heads=4) for _ in range(2))
        with torch.autocast("cpu", torch.bfloat16):
            wanted = reference(**batch, use_cache=False).loss
            with apply_ulysses(model):
                loss = model(**batch).loss
        torch.testing.assert_close(loss, wanted, rtol=1e-4, atol=0)
        for each in (wanted, loss):
            each.backward()
        for mine, own in zip(model.parameters(), reference.parameters(), strict=True):
            distributed.all_reduce(mine.grad)
            assert (mine.grad / size() - own.grad).norm() <= 1e-2 * own.grad.norm() + 1e-6


@check
def experts_with_their_load_balancing_loss() -> None:
    compare("qwen3_moe", causal_batch(), router_aux_loss_coef=1.0)
    compare("mixtral", causal_batch(), router_aux_loss_coef=1.0)


@check
def sliding_windows() -> None:
    compare("gemma3_text", causal_batch(), sliding_window=5, layer_types=["sliding_attention", "full_attention"])


@check
def heads_of_two_widths() -> None:
    compare("deepseek_v3", causal_batch(), v_head_dim=6)


@check
def every_other_kernel_bound_too() -> None:
    ops = {**EVERY_KERNEL, "attn_implementation": "sdpa"}
    compare("qwen3_moe", causal_batch(), ops, torch.float32, router_aux_loss_coef=1.0)
    assert any(key[0] == "cross_entropy_loss" for key in calls)
    assert any(key[0] == "load_balancing_loss" for key in calls)


@check
def a_kernel_that_takes_lengths_and_sinks() -> None:
    ops = {"preset": "eager", "attn_implementation": "by_lengths"}
    compare("llama", {**causal_batch(1), "position_ids": packed_positions()}, ops)
    padded = causal_batch()
    mask = torch.ones_like(padded["input_ids"])
    mask[1, LENGTH - 5 :] = 0
    padded["labels"][1, LENGTH - 5 :] = -100
    compare("llama", {**padded, "attention_mask": mask}, ops)
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5}
    compare("gpt_oss", causal_batch(), ops, attn_implementation="eager", **experts)


@check
def packed_sequences_under_a_kernel_that_takes_lengths() -> None:
    ops = {"preset": "eager", "attn_implementation": "by_lengths"}
    packed = {**causal_batch(1), "position_ids": packed_positions()}
    bounds = torch.tensor([0, 5, 6, 9, 16], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 7, "max_length_k": 7}
    compare("llama", {**packed, **lengths}, ops)
    # One GPU takes a mask that keeps everything for none, and then looks at the positions.
    mask = torch.ones_like(packed["input_ids"])
    compare("llama", packed, ops, like={**packed, "attention_mask": mask})
    one_row_for_all = torch.arange(LENGTH)[None]
    compare("llama", {**causal_batch(), "position_ids": one_row_for_all}, ops)


@check
def layers_that_are_computed_again_in_backward() -> None:
    reference, model = (build("llama", dtype=torch.float64, attn_implementation="sdpa") for _ in range(2))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    apply_ulysses(model)
    batches = [causal_batch(1, seed) for seed in (1, 2)]
    batches[1]["position_ids"] = torch.cat([torch.arange(7), torch.arange(9)])[None]
    for each in (reference, model):  # both forwards run before the first backward
        sum(each(**batch, use_cache=False).loss for batch in batches).backward()
    grads_equal(model, reference)
