"""What must hold on every rank of a sequence-parallel group; run by test_sequence_parallel.py in real processes.

Each check compares with the same computation on one rank, in float64.
"""

from __future__ import annotations

import dataclasses
import re
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForSequenceClassification, LlamaConfig

from counting_kernels import calls, counting_registry
from models import EVERY_KERNEL, build, tokens
from veomni_core import KernelSpec, bind, binding_of
from veomni_core.discovery import CORE
from veomni_core.errors import BindingError, BoundModelPickleError, ConfigError, HostError
from veomni_core.ops.attention import AttentionModule, standard
from veomni_core.registry import Registry, build_registry
from veomni_core.sequence_parallel import (
    apply_ulysses,
    gather_heads_scatter_seq,
    gather_outputs,
    gather_seq_scatter_heads,
    scatter_attention_heads,
    slice_input_tensor,
    sp_pad_and_slice,
    unpad_tensor,
)
from veomni_core.sites.attention import MASK_INTERFACE

CHECKS: dict[str, Callable[[], None]] = {}
LENGTH = 16
# Grouped matrix products know no float64.
KERNELS = {"attn_implementation": "sdpa", "experts_implementation": "eager"}


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


def run_all() -> None:
    """Print each check's name and what ranks failed with, on the first rank; ranks stay together between checks."""
    for name, function in CHECKS.items():
        torch.manual_seed(0)
        try:
            function()
            outcome = ""
        except Exception:
            outcome = traceback.format_exc()
        outcomes: list[Any] = [None] * size()
        distributed.all_gather_object(outcomes, outcome)
        if rank() == 0:
            print(repr((name, "\n".join(f"rank {r}: {text}" for r, text in enumerate(outcomes) if text))), flush=True)


def rank() -> int:
    return distributed.get_rank()


def size() -> int:
    return distributed.get_world_size()


def double(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


def equal(found: Tensor, wanted: Tensor, what: str = "") -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12, msg=lambda text: f"{what}: {text}")


def close(found: Tensor, wanted: Tensor, what: str) -> None:
    """As far as models compute in float32 whatever their dtype: norms, routers and the loss."""
    atol = 1e-9 if wanted.dtype == torch.float64 else 1e-6
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=atol, msg=lambda text: f"{what}: {text}")


def raises(kind: type[Exception], text: str, call: Callable[[], Any]) -> None:
    with pytest.raises(kind, match=re.escape(text)):
        call()


# The pieces


@check
def exchange_gives_all_positions_of_my_heads_and_back() -> None:
    whole = double(2, 3 * size(), 2 * size(), 5)
    mine = slice_input_tensor(whole, 1)
    heads = gather_seq_scatter_heads(mine, seq_dim=1, head_dim=2)
    equal(heads, slice_input_tensor(whole, 2))
    equal(gather_heads_scatter_seq(heads, head_dim=2, seq_dim=1), mine)
    weight = torch.randn_like(whole)
    (gradient,) = torch.autograd.grad(heads, whole, slice_input_tensor(weight, 2))
    equal(slice_input_tensor(gradient, 1), slice_input_tensor(weight, 1))
    last = gather_seq_scatter_heads(slice_input_tensor(whole, -3), seq_dim=-3, head_dim=-2)
    equal(last, heads)
    raises(ValueError, "can't be shared out", lambda: gather_seq_scatter_heads(double(1, 2, size() + 1, 3), 1, 2))


@check
def attention_over_ranks_is_attention() -> None:
    n = size()
    for q_heads, k_heads, width, value_width, batch in (
        (4, 4, 8, 8, 2),
        (4, 2, 8, 8, 1),
        (8, 1, 4, 6, 2),
        (12, 4, 2, 2, 1),
    ):
        query, key = double(batch, q_heads, 3 * n, width), double(batch, k_heads, 3 * n, width)
        value = double(batch, k_heads, 3 * n, value_width)
        wanted, _ = standard(AttentionModule(q_heads // k_heads), query, key, value, None)
        upstream = torch.randn_like(wanted)
        gradients = torch.autograd.grad(wanted, (query, key, value), upstream)
        mine = [slice_input_tensor(t, 2).detach().requires_grad_() for t in (query, key, value)]
        q, k, v = scatter_attention_heads(*mine)
        assert q.shape[1] == q_heads // n and k.shape[1] == max(k_heads // n, 1)
        output, _ = standard(AttentionModule(q.shape[1] // k.shape[1]), q, k, v, None)
        found = gather_heads_scatter_seq(output, head_dim=2, seq_dim=1)
        equal(found, slice_input_tensor(wanted, 1))
        for name, mine_, wanted_ in zip(
            "qkv", torch.autograd.grad(found, mine, slice_input_tensor(upstream, 1)), gradients, strict=True
        ):
            equal(mine_, slice_input_tensor(wanted_, 2), f"the gradient of {name}")
    raises(ValueError, "does not divide", lambda: scatter_attention_heads(*[double(1, size() + 1, 2, 4)] * 3))
    raises(
        ValueError,
        "neither divides the other",
        lambda: scatter_attention_heads(double(1, 3 * size(), 2, 4), *[double(1, 3, 2, 4)] * 2),
    )


@check
def slices_pad_and_gather() -> None:
    whole = torch.arange(2.0 * 5 * 3).view(2, 5, 3)
    part = sp_pad_and_slice(whole, dim=1, pad_value=-1, pad_scale=3)
    length = -(-5 // (3 * size())) * 3 * size()
    assert part.shape == (2, length // size(), 3)
    joined = gather_outputs(part, gather_dim=1)
    assert torch.equal(unpad_tensor(joined, 1, length - 5), whole)
    assert bool((joined[:, 5:] == -1).all())
    assert torch.equal(gather_outputs(part, gather_dim=-2), joined)
    raises(ValueError, "pad it to a multiple", lambda: slice_input_tensor(double(size() + 1), 0))


@check
def the_exchange_traces_without_a_graph_break() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = scatter_attention_heads(q, k, v)
        output, _ = standard(AttentionModule(1), q, k, v, None)
        return gather_heads_scatter_seq(output, head_dim=2, seq_dim=1)

    inputs = [double(1, 4, 2, 8) for _ in range(3)]
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    found, wanted = compiled(*inputs), attend(*inputs)
    equal(found, wanted)
    for mine, theirs in zip(
        torch.autograd.grad(found.sum(), inputs), torch.autograd.grad(wanted.sum(), inputs), strict=True
    ):
        equal(mine, theirs)


# Whole models


def by_lengths(*args: Any, **kwargs: Any) -> Any:
    """The contract's reference, given lengths and padding as a FlashAttention is, and no mask."""
    assert args[4] is None or args[4].dim() == 2
    return standard(*args, **kwargs)


setattr(by_lengths, MASK_INTERFACE, "flash_attention_2")


def registry() -> Registry:
    """The counting kernels, transformers' sdpa, and a kernel that takes lengths."""
    factories = {
        "sdpa": "transformers.integrations.sdpa_attention:sdpa_attention_forward",
        "by_lengths": f"{__name__}:by_lengths",
    }
    features = ("dense_mask", "padding_mask", "sliding_window", "packed", "sinks")
    attention = (
        KernelSpec(name, "attention", "standard", factory, features=features) for name, factory in factories.items()
    )
    counting = next(plugin for plugin in counting_registry("one").plugins if plugin.kernels)
    kernels = (*counting.kernels, *attention)
    return build_registry([CORE, dataclasses.replace(counting, kernels=kernels)], {})


def compare(
    family: str,
    batch: dict[str, Any],
    ops: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float64,
    **config: Any,
) -> None:
    """Loss, auxiliary loss, logits and the mean of the ranks' gradients are those of one rank."""
    config = {**KERNELS, **config}
    reference, model = (build(family, dtype=dtype, **config) for _ in range(2))
    if ops:
        bind(model, ops, registry=registry())
    wanted = reference(**batch, use_cache=False)
    wanted.loss.backward()
    with apply_ulysses(model) as applied:
        assert f"sp={size()}" in applied.describe()
        found = model(**batch)
        found.loss.backward()
    torch.testing.assert_close(
        found.loss, wanted.loss, rtol=1e-6, atol=0, check_dtype=False
    )  # transformers takes it in float32
    if getattr(wanted, "aux_loss", None) is not None:
        torch.testing.assert_close(found.aux_loss, wanted.aux_loss, rtol=1e-6, atol=0, check_dtype=False)
    if not ops:
        kept = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
        close(gather_outputs(found.logits, 1)[kept], wanted.logits[kept], "logits")
    grads_equal(model, reference)


def grads_equal(model: torch.nn.Module, reference: torch.nn.Module) -> None:
    mine = dict(model.named_parameters())
    for name, parameter in reference.named_parameters():
        if parameter.grad is None:
            continue
        gradient = mine[name].grad if mine[name].grad is not None else torch.zeros_like(mine[name])
        distributed.all_reduce(gradient)
        close(gradient / size(), parameter.grad, name)


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
    batch = causal_batch(1)
    lengths = [5, 1, 3, 7]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    compare("llama", {**batch, "position_ids": positions})


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
    batch = causal_batch(1)
    positions = torch.cat([torch.arange(length) for length in (5, 1, 3, 7)])[None]
    compare("llama", {**batch, "position_ids": positions}, ops)
    padded = causal_batch()
    mask = torch.ones_like(padded["input_ids"])
    mask[1, LENGTH - 5 :] = 0
    padded["labels"][1, LENGTH - 5 :] = -100
    compare("llama", {**padded, "attention_mask": mask}, ops)
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5}
    compare("gpt_oss", causal_batch(), ops, attn_implementation="eager", **experts)


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


# With data parallelism: n / 2 groups of two


def two_by_two(family: str, wrap: Callable[[torch.nn.Module], torch.nn.Module]) -> None:
    mesh = init_device_mesh("cpu", (size() // 2, 2), mesh_dim_names=("dp", "sp"))
    reference = build(family, dtype=torch.float64, **KERNELS)
    model = build(family, dtype=torch.float64, **KERNELS)
    apply_ulysses(model, mesh["sp"].get_group())
    batches = [causal_batch(seed=seed) for seed in range(mesh["dp"].size())]
    for batch in batches:
        (reference(**batch, use_cache=False).loss / len(batches)).backward()
    wrapped = wrap(model)
    loss = wrapped(**batches[mesh["dp"].get_local_rank()]).loss
    loss.backward()
    wanted = dict(reference.named_parameters())
    compared = 0
    for name, parameter in model.named_parameters():
        if wanted[name].grad is not None:
            gradient = parameter.grad
            close(gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient, wanted[name].grad, name)
            compared += 1
    assert compared > 10


@check
def with_fsdp2_over_all_ranks() -> None:
    def shard(model: torch.nn.Module) -> torch.nn.Module:
        for layer in model.model.layers:
            fully_shard(layer)
        return fully_shard(model)

    two_by_two("llama", shard)
    two_by_two("qwen3_moe", shard)


@check
def with_ddp_over_all_ranks() -> None:
    two_by_two("llama", DistributedDataParallel)


# What it leaves alone, and what it refuses


@check
def undo_restores_the_model_and_transformers() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    interfaces = (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)
    names = [set(interface.valid_keys()) for interface in interfaces]
    model = build("qwen3_moe", attn_implementation="sdpa")
    binding = bind(model, {**EVERY_KERNEL, "attn_implementation": "sdpa"}, registry=registry())
    before = {path: dict(vars(module)) for path, module in model.named_modules()}
    receipt = binding.receipt
    applied = apply_ulysses(model)
    assert binding_of(model) is binding and binding.plan is receipt.plan
    assert f"Ulysses, sp={size()}, over sdpa" in binding.receipt.table()
    assert binding.receipt.to_dict()["sequence_parallel"]
    raises(BindingError, "already", lambda: apply_ulysses(model))
    raises(BindingError, "Take those back first", binding.undo)
    raises(BindingError, "can't be copied", lambda: __import__("copy").deepcopy(model))
    raises(BoundModelPickleError, "can't be pickled", lambda: __import__("pickle").dumps(applied))
    applied.undo()
    assert {path: dict(vars(module)) for path, module in model.named_modules()} == before
    assert binding.receipt is receipt
    assert [set(interface.valid_keys()) for interface in interfaces] == names
    raises(BindingError, "not in force", applied.undo)
    binding.undo()


@check
def two_models_keep_their_own_groups() -> None:
    mesh = init_device_mesh("cpu", (size() // 2, 2), mesh_dim_names=("dp", "sp"))
    pair, all_ranks = (build("llama", attn_implementation="sdpa") for _ in range(2))
    alone = build("llama", attn_implementation="sdpa")
    apply_ulysses(pair, mesh["sp"].get_group())
    apply_ulysses(all_ranks)
    batch = causal_batch()
    losses = [model(**batch).loss for model in (pair, all_ranks, alone)]
    assert pair(**batch).logits.shape[1] == LENGTH // 2
    assert all_ranks(**batch).logits.shape[1] == LENGTH // size()
    for loss in losses[:2]:
        torch.testing.assert_close(loss, losses[2], rtol=1e-6, atol=1e-6)


@check
def models_that_it_would_compute_wrongly_are_refused() -> None:
    for config, text in (
        ({"hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 1}, "does not divide 3 query heads"),
        ({"hidden_size": 36, "num_attention_heads": 12, "num_key_value_heads": 3}, "neither divides the other"),
        ({"attn_implementation": "eager"}, "its attention is eager"),
    ):
        model = build("llama", **{"attn_implementation": "sdpa", **config})
        before = dict(vars(model))
        raises(ConfigError, text, lambda model=model: apply_ulysses(model))
        assert dict(vars(model)) == before
    small = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "vocab_size": 64,
    }
    classifier = AutoModelForSequenceClassification.from_config(LlamaConfig(**small, attn_implementation="sdpa"))
    raises(ConfigError, "not that of a causal language model", lambda: apply_ulysses(classifier))
    with torch.device("meta"):
        for family, text in (("mamba", "found 0: none"), ("qwen3_next", "linear_attention"), ("bloom", "found 0")):
            raises(ConfigError, text, lambda family=family: apply_ulysses(build(family, num_hidden_layers=4)))


@check
def inputs_that_it_would_cut_wrongly_are_refused_on_every_rank() -> None:
    model = build("llama", attn_implementation="sdpa")
    apply_ulysses(model)
    ids = tokens(2, LENGTH)
    raises(ConfigError, f"a sequence of {LENGTH + 1} can't be shared", lambda: model(tokens(2, LENGTH + 1)))
    raises(ConfigError, "keeps no cache", lambda: model(ids, use_cache=True))
    raises(ConfigError, "logits_to_keep", lambda: model(ids, logits_to_keep=1))
    raises(ConfigError, "pixel_values", lambda: model(ids, pixel_values=torch.zeros(1, 3)))
    raises(BindingError, "outside of the model", lambda: model.model(ids))
    other = build("llama", attn_implementation="sdpa")
    apply_ulysses(other)
    raises(HostError, "different batches", lambda: other(tokens(2, LENGTH, seed=rank())))
    other(ids)
