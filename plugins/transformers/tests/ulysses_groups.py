"""Groups of ranks: with data parallelism, and one for each of two models."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from ulysses_models import KERNELS, LENGTH, causal_batch
from ulysses_ranks import check, close, size

from models import build
from veomni_transformers.sequence import apply_ulysses


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
