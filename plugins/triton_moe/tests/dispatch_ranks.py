"""What the ranks of test_token_dispatch run: tiny models on transformers' engine, with and without a bound dispatch."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

from models import build, tokens
from veomni_core import bind
from veomni_transformers.captured_cells import captured_cell

GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24, "output_router_logits": True,
           "layer_types": ["sliding_attention", "full_attention"]}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {"qwen3_moe": {}, "deepseek_v3": {}, "gpt_oss": GPT_OSS}
LAYOUTS = {
    2: [{"fsdp_size": 2, "ep_size": 2}, {"tp_size": 2, "ep_size": 2}],
    4: [
        {"fsdp_size": 4, "ep_size": 4},
        {"fsdp_size": 4, "ep_size": 2},
        {"fsdp_size": 2, "tp_size": 2, "ep_size": 4},
    ],
}


def saved(folder: str, family: str) -> None:
    """Save a whole model, on one rank."""
    if dist.get_rank() == 0:
        build(family, **FAMILIES[family]).save_pretrained(os.path.join(folder, family))
    dist.barrier()


def sharded(folder: str, family: str, layout: dict[str, int], **engine: Any) -> Any:
    """The model, loaded on transformers' engine."""
    config = DistributedConfig(**layout, **engine)
    kind = type(build(family, **FAMILIES[family]))
    return kind.from_pretrained(os.path.join(folder, family), distributed_config=config).train()


def bound(model: Any, value: Any = "alltoall_dedup") -> Any:
    """The binding of ``token_dispatch_implementation: value``, and of nothing else."""
    config = {"preset": "eager", "token_dispatch_implementation": value}
    return bind(model, config, device="cpu")


def step(model: Any, length: int = 9) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss and this rank's part of every gradient, on a batch that ranks of one tensor-parallel group share."""
    model.zero_grad(set_to_none=True)
    ids = tokens(2, length, seed=10 + model._mesh_manager.get_mesh("fsdp").get_local_rank())
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: _local(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_equal(found: Any, wanted: Any, of: str) -> None:
    """The loss and every gradient within 1e-6, as a share of the largest tensors' norms."""
    assert (found[0] - wanted[0]).abs() <= 1e-6 * wanted[0].abs(), of
    assert found[1].keys() == wanted[1].keys(), of
    for name, gradient in wanted[1].items():
        error = (found[1][name] - gradient).norm()
        assert error <= 1e-6 * gradient.norm() + 1e-9, f"{of}: {name} is off by {error} of {gradient.norm()}"


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def captured(model: Any) -> list[Any]:
    """What each expert-parallel module's forward calls."""
    forwards = [vars(module)["forward"] for module in model.modules() if "forward" in vars(module)]
    return [cell for forward in forwards if (cell := captured_cell(forward, "implementation")) is not None]


def collectives(function: Any) -> list[tuple[int, list[int] | None, int]]:
    """The all-to-alls of a call: the rows, how many each rank gets of them, and the bytes of one."""
    seen = []
    exchange = dist.all_to_all_single

    def noted(output: Any, rows: Any, incoming: Any = None, outgoing: Any = None, **options: Any) -> Any:
        seen.append((len(rows), outgoing, rows[:1].numel() * rows.element_size() if len(rows) else 0))
        return exchange(output, rows, incoming, outgoing, **options)

    dist.all_to_all_single = noted
    try:
        function()
    finally:
        dist.all_to_all_single = exchange
    return seen
