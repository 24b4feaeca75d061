"""Runs on each rank: models that transformers' distributed engine shards, bound, beside the same models in one process.

Every rank draws the same whole model. Rank 0 trains it alone, on the batches of all data-parallel ranks, and keeps what
it got for the others.
"""

from __future__ import annotations

import json
import re
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from counting_kernels import calls, counting_registry
from models import EVERY_KERNEL, build, tokens
from veomni_core import apply_plan, bind, get_parallel_plan, make_plan

# More steps tell no more. A fault of a relative 1e-5 in one weight's gradients shows as 6.6e-6 after six steps, as
# 9.8e-6 after twenty; and rounding grows with it.
STEPS = 6
_EXPERTS = {"n_routed_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3_moe": {},
    "mixtral": {},
    "deepseek_v3": {},
    "gpt_oss": {**_EXPERTS, "intermediate_size": 24, "layer_types": ["sliding_attention", "full_attention"]},
    "glm4_moe": {
        **_EXPERTS,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
    },
}
LAYOUTS: dict[int, dict[str, dict[str, int]]] = {
    2: {
        "FSDP2 2": {"fsdp_size": 2},
        "TP 2": {"tp_size": 2},
        "FSDP2 2, EP 2": {"fsdp_size": 2, "ep_size": 2},
        "TP 2, EP 2": {"tp_size": 2, "ep_size": 2},
    },
    4: {
        "FSDP2 2, TP 2": {"fsdp_size": 2, "tp_size": 2},
        "FSDP2 4, EP 2": {"fsdp_size": 4, "ep_size": 2},
        "FSDP2 4, EP 4": {"fsdp_size": 4, "ep_size": 4},
        "FSDP2 2, TP 2, EP 4": {"fsdp_size": 2, "tp_size": 2, "ep_size": 4},
    },
}


def has_layout(family: str, layout: dict[str, int]) -> bool:
    return family != "llama" or "ep_size" not in layout


def report_cases(folder: str, processes: int, families: list[str]) -> None:
    """Print a line of JSON for each of ``families`` and layout."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    rank = torch.distributed.get_rank()
    for family in families:
        whole = build(family, **FAMILIES[family])
        weights = Path(folder) / family
        if rank == 0:
            whole.save_pretrained(weights)
        alone: dict[int, dict[str, Any]] = {}
        for name, layout in LAYOUTS[processes].items():
            if not has_layout(family, layout):
                continue
            batches = layout.get("fsdp_size", 1)
            if batches not in alone:
                alone[batches] = _kept(weights / f"alone_{batches}.pt", lambda: _train_alone(weights, batches))  # noqa: B023
            report = _case(whole, weights, layout, alone[batches])
            print(json.dumps({"family": family, "layout": name, **report}), flush=True)


def _kept(file: Path, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What ``make`` gives on rank 0, on every rank."""
    if torch.distributed.get_rank() == 0:
        file.parent.mkdir(exist_ok=True)
        torch.save(make(), file)
    torch.distributed.barrier()
    return dict(torch.load(file))


def _of_first_rank(make: Callable[[], Any]) -> Any:
    """What ``make`` gives on rank 0, where all ranks would make the same."""
    made = [make() if torch.distributed.get_rank() == 0 else None]
    torch.distributed.broadcast_object_list(made)
    return made[0]


def _ids(step: int, batch: int) -> Tensor:
    return tokens(2, 9, seed=100 + 10 * step + batch)


def _gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: _whole(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}


def _whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach()


def _optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    # Adam divides by a gradient's size, and so turns the rounding of gradients near zero into steps of full size.
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, foreach=False)


def _train_alone(weights: Path, batches: int) -> dict[str, Any]:
    model = type_of(weights).from_pretrained(weights, attn_implementation="eager").train()
    optimizer, losses, gradients = _optimizer(model), [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = torch.zeros(())
        for batch in range(batches):
            ids = _ids(step, batch)
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss / batches
            loss.backward()
            total += loss.detach()
        losses.append(total.item())
        if step in (0, STEPS - 1):
            gradients.append(_gradients(model))
        optimizer.step()
    return {"losses": losses, "gradients": gradients, "weights": {n: p.detach() for n, p in model.named_parameters()}}


def type_of(weights: Path) -> type[PreTrainedModel]:
    return getattr(transformers, json.loads((weights / "config.json").read_text())["architectures"][0])


def _case(whole: PreTrainedModel, weights: Path, layout: dict[str, int], alone: dict[str, Any]) -> dict[str, Any]:
    from transformers.distributed.configuration_utils import DistributedConfig

    from test_nothing_else_changes import of_process

    config = DistributedConfig(**layout)
    model: Any = type(whole).from_pretrained(weights, distributed_config=config, attn_implementation="eager").train()
    batch = model._mesh_manager.get_mesh("fsdp").get_local_rank()
    registry = counting_registry("one")
    before = _step(model, _ids(0, batch))
    process = dict(of_process())
    binding = bind(model, EVERY_KERNEL, registry=registry)
    with torch.no_grad():
        logits_off = (model.eval()(_ids(0, 0)).logits - whole.eval()(_ids(0, 0)).logits).abs().max().item()
    model.train(), whole.train()
    binding.undo()
    undone = _step(model, _ids(0, batch))
    binding = apply_plan(model, binding.plan, registry)
    changed = [name for name, value in of_process() if name in process and value != process[name]]
    planned = _of_first_rank(lambda: make_plan(whole, EVERY_KERNEL, registry=registry, distributed_config=layout))
    calls.clear()
    optimizer, losses, gradients = _optimizer(model), [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = _step(model, _ids(step, batch))
        torch.distributed.all_reduce(loss)
        losses.append(loss.item() / torch.distributed.get_world_size())
        if step in (0, STEPS - 1):
            gradients.append(_gradients(model))
        optimizer.step()
    calls_of_ops: Counter[str] = Counter()
    for (op_name, *_), count in calls.items():
        calls_of_ops[op_name] += count
    wanted, found = alone["gradients"], gradients
    norms = [
        [torch.stack([g.norm() for g in each.values()]).norm().item() for each in all_] for all_ in (wanted, found)
    ]
    return {
        "losses_off": max(abs(a - b) / abs(b) for a, b in zip(losses, alone["losses"], strict=True)),
        "norms_off": max(abs(a - b) / b for a, b in zip(*norms, strict=True)),
        "gradients_off": _furthest(found[0], wanted[0]),
        "gradients_off_in_norm": max(_off_in_norm(*each) for each in zip(found, wanted, strict=True)),
        "logits_off": logits_off,
        "divided_as_planned": _divided(model) == _to_be_divided(whole, layout),
        "weights_off": _furthest({n: _whole(p) for n, p in model.named_parameters()}, alone["weights"]),
        "called": dict(calls_of_ops),
        "bound": {op.op_name: bound for op in binding.plan.ops if (bound := sum(d.bound for d in op.sites))},
        "eager": sorted({f"{op.op_name}: {d.reason}" for op in binding.plan.ops for d in op.sites if not d.bound}),
        "changed": dict(binding.receipt.changed),
        "planned_differently": list(binding.plan.diff(planned)),
        "same_bits_after_undo": torch.equal(before, undone),
        "globals_changed": changed,
    }


def _divided(model: Any) -> dict[str, int]:
    """The dimension along which the engine has divided each parameter over the ranks of TP or EP."""
    found = {}
    for name, parameter in model.named_parameters():
        meshes = getattr(getattr(parameter, "device_mesh", None), "mesh_dim_names", ())
        for mesh, placement in zip(meshes, getattr(parameter, "placements", ()), strict=True):
            if mesh in ("tp", "ep") and hasattr(placement, "dim"):
                found[name] = placement.dim % parameter.dim()
    return found


def _to_be_divided(whole: PreTrainedModel, layout: dict[str, int]) -> dict[str, int]:
    plan = get_parallel_plan(whole).to_dict()
    ways = {**(plan["tp"] if "tp_size" in layout else {}), **(plan["ep"] if "ep_size" in layout else {})}
    return {
        name: ways[path] for name, _ in whole.named_parameters() if (path := re.sub(r"\.\d+\.", ".*.", name)) in ways
    }


def _step(model: Any, ids: Tensor) -> Tensor:
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.detach().clone()


def _furthest(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> tuple[str, float]:
    """The tensor with the element that is the furthest from what is wanted, and how far off it is."""
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    off = {name: (found[name] - wanted[name]).abs().max().item() for name in wanted}
    return max(off.items(), key=lambda item: item[1])


def _off_in_norm(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """How far all tensors together are off, relative."""
    size = torch.stack([wanted[name].norm() for name in wanted]).norm()
    return (torch.stack([(found[name] - wanted[name]).norm() for name in wanted]).norm() / size).item()
