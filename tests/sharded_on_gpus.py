"""Runs on each rank: models on transformers' engine, with real kernels, beside the unbound engine and one process.

    torchrun --standalone --nproc_per_node=2 tests/sharded_on_gpus.py FOLDER [KERNELS ...]

Prints a line for each case and writes it as JSON into ``FOLDER/cases``. On CPUs, over gloo, only ``grouped_mm`` runs.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.distributed.tensor.placement_types import _StridedShard

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "core" / "tests"))

from models import build
from veomni_core import Hardware, bind
from veomni_core.discovery.discover import discover

# Widths that QuACK's GEMMs and TMA take, on each of two ranks too.
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "head_dim": 32,
    "vocab_size": 256,
    "num_experts": 8,
    "initializer_range": 0.1,
}
FAMILIES = ("qwen3_moe", "llama")
LAYOUTS = {
    "FSDP2 2": {"fsdp_size": 2},
    "FSDP2 2, EP 2": {"fsdp_size": 2, "ep_size": 2},
    "TP 2": {"tp_size": 2},
    "TP 2, EP 2": {"tp_size": 2, "ep_size": 2},
}
DTYPES = {"fused_triton": "float32", "fused_quack": "bfloat16", "grouped_mm": "float32"}
DISPATCHERS = ("eager", "alltoall_dedup")
_LIBRARY = {"fused_triton": "triton", "fused_quack": "quack", "grouped_mm": "torch"}  # of the norms and so on


@dataclass(frozen=True)
class Case:
    """A model, how it is sharded, its experts' kernel (by which the others are chosen) and its dispatcher."""

    family: str
    layout: str
    kernel: str
    dispatcher: str = "eager"

    def __str__(self) -> str:
        return f"{self.family}, {self.layout}, {self.kernel}, {self.dispatcher}"

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, DTYPES[self.kernel])
        return found

    def ops(self) -> dict[str, Any]:
        """What is bound; a list where a sharded site may have no such kernel."""
        library = _LIBRARY[self.kernel]
        ops: dict[str, Any] = {
            "preset": "eager",
            "rms_norm_implementation": [library, "eager"],
            "cross_entropy_loss_implementation": ["chunk_loss", "eager"],
        }
        if library != "torch":
            ops["rotary_pos_emb_implementation"] = [library, "eager"]
        if self.family == "llama":
            ops["swiglu_mlp_implementation"] = ["torch" if library == "torch" else "triton", "eager"]
            return ops
        ops["moe_implementation"] = self.kernel
        if self.dispatcher != "eager":
            ops["token_dispatch_implementation"] = self.dispatcher
        return ops

    def missing(self) -> str:
        """Why it can't run here; empty if it can."""
        registry = discover()
        wanted = [("moe_experts", "standard", self.kernel)]
        if self.dispatcher != "eager":
            wanted.append(("token_dispatch", "exchanged", self.dispatcher))
        for op, variant, name in wanted:
            spec = registry.find(op, variant, name) if op in registry.ops else None
            if spec is None:
                return f"no installed plugin has {name} for {op}"
            if unmet := spec.hardware.unmet(Hardware.detect()):
                return f"{name}: {'; '.join(unmet)}"
        return ""


def cases(kernels: tuple[str, ...]) -> Iterator[Case]:
    for kernel in kernels:
        for family in FAMILIES:
            for layout, sizes in LAYOUTS.items():
                if "ep_size" not in sizes:
                    yield Case(family, layout, kernel)
                elif family != "llama":
                    yield from (Case(family, layout, kernel, dispatcher) for dispatcher in DISPATCHERS)


def report(folder: Path, kernels: tuple[str, ...]) -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    first = dist.get_rank() == 0
    for family in FAMILIES:
        whole = build(family, **SIZES)
        if first:
            whole.save_pretrained(folder / family)
    dist.barrier()
    exact: dict[tuple[str, int], dict[str, Tensor]] = {}
    for case in cases(kernels):
        if reason := case.missing():
            found: dict[str, Any] = {"skipped": reason}
        else:
            try:
                found = _measured(folder / case.family, case, exact)
            except Exception as error:
                traceback.print_exc()
                found = {"failed": f"{type(error).__name__}: {error}"}
        if first:
            print(f"{case}: {_line(found)}", flush=True)
            with (folder / "cases").open("a") as lines:
                lines.write(json.dumps({"case": str(case), **found}) + "\n")


def _line(found: dict[str, Any]) -> str:
    figures = {key: f"{value:.1e}" if isinstance(value, float) else value for key, value in found.items()}
    return ", ".join(f"{key} {value}" for key, value in figures.items())


def _measured(weights: Path, case: Case, exact: dict[tuple[str, int], dict[str, Tensor]]) -> dict[str, Any]:
    """How far the engine, unbound and bound, is from one process in float64, and they from each other."""
    batches = LAYOUTS[case.layout].get("fsdp_size", 1)
    key = (case.family, batches)
    if key not in exact:
        exact[key] = _in_one_process(weights, batches)
    model = _sharded(weights, case)
    unbound = _step(model)
    binding = bind(model, case.ops())
    bound = _step(model)
    losses, wanted = _losses(model), _losses(_sharded(weights, case))
    bound_ops = {op.op_name: sorted({site.kernel for site in op.sites if site.bound}) for op in binding.plan.ops}
    return {
        "bound to unbound": _distance(bound, unbound),
        "unbound to exact": _distance(unbound, exact[key]),
        "bound to exact": _distance(bound, exact[key]),
        "losses of 20 steps, bound to unbound": max(abs(a / b - 1) for a, b in zip(losses, wanted, strict=True)),
        "worst": _worst(bound, unbound),
        "kernels": {op: names for op, names in bound_ops.items() if names},
    }


def _class_of(weights: Path) -> Any:
    return getattr(transformers, json.loads((weights / "config.json").read_text())["architectures"][0])


def _sharded(weights: Path, case: Case) -> Any:
    from transformers.distributed.configuration_utils import DistributedConfig

    return (
        _class_of(weights)
        .from_pretrained(
            weights,
            dtype=case.dtype,
            distributed_config=DistributedConfig(**LAYOUTS[case.layout]),
            attn_implementation="eager",
            experts_implementation="eager",
        )
        .train()
    )


def _ids(batch: int) -> Tensor:
    ids = torch.randint(3, SIZES["vocab_size"], (2, 61), generator=torch.Generator().manual_seed(100 + batch))
    return ids.to(_DEVICE)


def _in_one_process(weights: Path, batches: int) -> dict[str, Tensor]:
    """The loss (by the name ``loss``) and the gradients over all batches, in float64 where the code keeps it."""
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = _class_of(weights).from_pretrained(weights, dtype=torch.float64, **options).to(_DEVICE).train()
    loss = sum(model(input_ids=_ids(n), labels=_ids(n), use_cache=False).loss for n in range(batches)) / batches
    loss.backward()
    return {"loss": loss.detach(), **_gradients(model)}


def _step(model: Any) -> dict[str, Tensor]:
    """The same of a sharded model, on this rank's batch."""
    model.zero_grad(set_to_none=True)
    ids = _ids(model._mesh_manager.get_mesh("fsdp").get_local_rank())
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    mean = loss.detach().double()
    dist.all_reduce(mean)
    return {"loss": mean / dist.get_world_size(), **_gradients(model)}


def _losses(model: Any) -> list[float]:
    """The mean losses over the ranks, of 20 optimizer steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, foreach=False)
    losses = []
    for step in range(20):
        optimizer.zero_grad()
        ids = _ids(10 * step + model._mesh_manager.get_mesh("fsdp").get_local_rank())
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        mean = loss.detach().double()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses


def _gradients(model: Any) -> dict[str, Tensor]:
    named = ((name, parameter.grad) for name, parameter in model.named_parameters() if parameter.grad is not None)
    return {name: _whole(gradient).double() for name, gradient in named}


def _whole(tensor: Any) -> Tensor:
    """The whole of a DTensor. PyTorch 2.11 can't gather gate and up of experts whose width is divided."""
    [placement, *others] = getattr(tensor, "placements", [None])
    if others or not isinstance(placement, _StridedShard):
        return tensor.full_tensor() if placement is not None else tensor
    mine = tensor.to_local().contiguous()
    parts = [torch.empty_like(mine) for _ in range(tensor.device_mesh.size())]
    dist.all_gather(parts, mine, group=tensor.device_mesh.get_group())
    halves = [part.chunk(placement.split_factor, placement.dim) for part in parts]  # of each rank: gate, up
    return torch.cat([each for half in zip(*halves, strict=True) for each in half], placement.dim)


def _distance(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Relative, in norm: of the loss, or of all gradients together, whichever is further off."""
    if found.keys() != wanted.keys():
        raise AssertionError(f"gradients of one alone: {sorted(found.keys() ^ wanted.keys())}")
    names = [name for name in wanted if name != "loss"]
    off = torch.stack([(found[n] - wanted[n]).norm() for n in names]).norm()
    size = torch.stack([wanted[n].norm() for n in names]).norm()
    loss_off = (found["loss"] - wanted["loss"]).abs() / wanted["loss"].abs()
    value = max((off / size).item(), loss_off.item())
    return value if (off + loss_off).isfinite() else float("inf")


def _worst(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> tuple[str, float]:
    """The gradient that is the furthest from what is wanted."""
    off = {n: ((found[n] - wanted[n]).norm() / wanted[n].norm().clamp_min(1e-12)).item() for n in wanted}
    return max(off.items(), key=lambda item: item[1])


def main() -> None:
    folder, kernels = Path(sys.argv[1]), tuple(sys.argv[2:]) or tuple(k for k in DTYPES if k != "grouped_mm")
    patience = timedelta(seconds=90)
    if _DEVICE.type == "cuda":
        torch.cuda.set_device(_DEVICE)
        dist.init_process_group("nccl", device_id=_DEVICE, timeout=patience)
    else:
        dist.init_process_group("gloo", timeout=patience)
    report(folder, kernels)
    dist.barrier()
    dist.destroy_process_group()


_DEVICE = (
    torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else torch.device("cpu")
)

if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may outlive the interpreter's teardown, which then aborts
