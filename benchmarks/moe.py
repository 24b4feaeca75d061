"""Mixture-of-experts MLPs on one GPU: our kernels against transformers, veomni-torch, Liger and SonicMoE.

    python benchmarks/moe.py [--shapes qwen3-30b-a3b …] [--skip "Liger fused MoE" …] [--name moe_h200]

Every contender runs in one process on the same tensors. Its result and gradients are compared first with the contract's
reference in float64. TFLOP/s counts the useful work, 18·T·K·H·I for forward and backward. Peak memory is what a step
takes beyond its inputs, the gradients that it leaves among it. Writes ``docs/benchmarks/<name>.json`` and ``.md``.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from gpu import (
    copy_gb_per_second,
    launches,
    peak_mib,
    product_tflop_per_second,
    relative_error,
    saved_mib,
    timing,
    training_step,
)
from results import machine, write_results
from veomni_core.ops import moe_experts as contract

Kernel = Callable[..., Tensor]


@dataclass(frozen=True)
class Shape:
    """Tokens, hidden size, intermediate size, experts, experts per token."""

    tokens: int
    hidden: int
    intermediate: int
    experts: int
    k: int

    @property
    def forward_flop(self) -> float:
        """The useful work of a forward; a backward has twice as much."""
        return 6.0 * self.tokens * self.k * self.hidden * self.intermediate


PEERS = ("liger-kernel", "sonic-moe", "quack-kernels")
SHAPES = {
    "qwen3-30b-a3b": Shape(16384, 2048, 768, 128, 8),
    "olmoe": Shape(16384, 2048, 1024, 64, 8),
    "mixtral-8x7b": Shape(8192, 4096, 14336, 8, 2),
    "deepseek-v3 shard": Shape(16384, 7168, 2048, 8, 1),
    "qwen3-30b-a3b, T=2048": Shape(2048, 2048, 768, 128, 8),
    "512 experts of 512, K=10": Shape(16384, 2048, 512, 512, 10),
}


class Problem:
    """Random operands of one shape; the experts of a token are the best of random scores, as a router takes them."""

    def __init__(self, shape: Shape) -> None:
        torch.manual_seed(0)
        scores = torch.randn(shape.tokens, shape.experts, device="cuda").softmax(dim=-1)
        weights, self.index = scores.topk(shape.k, dim=-1)
        self.hidden = self._leaf(torch.randn(shape.tokens, shape.hidden, device="cuda"))
        self.weights = self._leaf(weights / weights.sum(dim=-1, keepdim=True))
        width = 2 * shape.intermediate
        self.gate_up = self._leaf(0.02 * torch.randn(shape.experts, width, shape.hidden, device="cuda"))
        self.down = self._leaf(0.02 * torch.randn(shape.experts, shape.hidden, shape.intermediate, device="cuda"))
        self.upstream = torch.randn_like(self.hidden)

    @staticmethod
    def _leaf(values: Tensor) -> Tensor:
        return values.to(torch.bfloat16).requires_grad_()

    @property
    def leaves(self) -> dict[str, Tensor]:
        """The tensors whose gradients are taken."""
        return {"hidden": self.hidden, "weights": self.weights, "gate_up": self.gate_up, "down": self.down}

    def forget_gradients(self) -> None:
        """Give back the memory of the gradients; one kernel would add to them instead of giving its own."""
        for tensor in self.leaves.values():
            tensor.grad = None

    def arguments(self) -> tuple[Tensor, ...]:
        """The contract's call."""
        return (self.hidden, self.index, self.weights, self.gate_up, self.down)

    def exact(self) -> dict[str, Tensor]:
        """The result and the gradients in float64, rounded to float32 to be kept."""
        leaves = [tensor.detach().double().requires_grad_() for tensor in self.leaves.values()]
        hidden, weights, gate_up, down = leaves
        result = contract.standard(hidden, self.index, weights, gate_up, down)
        gradients = torch.autograd.grad(result, leaves, self.upstream.double())
        named = zip(("result", *self.leaves), (result.detach(), *gradients), strict=True)
        return {name: value.float() for name, value in named}


def contenders() -> Iterator[tuple[str, Kernel]]:
    """Every kernel that can be imported here, by name; what can't is said."""
    from veomni_torch.moe_experts import standard as grouped
    from veomni_triton_moe.moe_experts import standard, standard_accumulating, standard_recomputing

    yield "veomni fused_triton", standard
    yield "veomni fused_triton, recomputing", standard_recomputing
    yield "veomni fused_triton, accumulating", standard_accumulating
    yield "veomni grouped_mm", grouped
    for name, make in (
        ("veomni fused_quack", _fused_quack),
        ("transformers eager", _transformers_eager),
        ("transformers grouped_mm", _transformers_grouped_mm),
        ("transformers grouped_mm, compiled", lambda: torch.compile(_transformers_grouped_mm(), dynamic=False)),
        ("Liger fused MoE", _liger),
        ("SonicMoE", _sonic),
    ):
        try:
            yield name, make()
        except ImportError as error:
            print(f"{name} is left out: {error}")


def _fused_quack() -> Kernel:
    from veomni_quack.moe_experts.kernel import standard

    return standard


class _Experts:
    """What transformers' experts functions read of a module."""

    has_bias, is_transposed, has_gate, is_concatenated, config = False, False, True, True, None

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        self.num_experts, self.gate_up_proj, self.down_proj = len(gate_up), gate_up, down

    @staticmethod
    def act_fn(gate: Tensor) -> Tensor:
        return torch.nn.functional.silu(gate)

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate) * up


def _transformers_eager() -> Kernel:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    eager = Qwen3MoeExperts.forward
    eager = getattr(eager, "__wrapped__", eager)
    return lambda hidden, index, weights, gate_up, down: eager(_Experts(gate_up, down), hidden, index, weights)


def _transformers_grouped_mm() -> Kernel:
    from transformers.integrations.moe import grouped_mm_experts_forward as grouped

    return lambda hidden, index, weights, gate_up, down: grouped(_Experts(gate_up, down), hidden, index, weights)


def _liger() -> Kernel:
    from liger_kernel.ops import LigerFusedMoEFunction

    return lambda hidden, index, weights, gate_up, down: LigerFusedMoEFunction.apply(
        hidden, gate_up, down, index.to(torch.int32), weights
    )


def _sonic() -> Kernel:
    import quack.autotuner
    from sonicmoe.enums import ActivationType
    from sonicmoe.functional import moe_general_routing_inputs

    # Its search takes minutes per shape, so it runs with its default configurations.
    quack.autotuner.Autotuner.__call__ = lambda self, *args, **kwargs: self.fn(*args, **{**kwargs, "config": None})

    def sonic(hidden: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        tokens, k = index.shape
        token = torch.arange(tokens, device=hidden.device, dtype=torch.int32).repeat_interleave(k)
        stream = torch.cuda.current_stream().cuda_stream
        routes = (weights.float().reshape(-1), token, index.reshape(-1).to(torch.int32))
        experts = (gate_up.permute(1, 2, 0), None, down.permute(1, 2, 0), None, len(down))
        found = moe_general_routing_inputs(hidden, *routes, *experts, stream, ActivationType.SWIGLU, False, True)
        return found[0] if isinstance(found, tuple) else found

    return sonic


def errors(kernel: Kernel, problem: Problem, exact: dict[str, Tensor]) -> dict[str, float]:
    """How far the result and each gradient are from float64."""
    problem.forget_gradients()
    result = kernel(*problem.arguments())
    gradients = torch.autograd.grad(result, list(problem.leaves.values()), problem.upstream)
    found = dict(zip(("result", *problem.leaves), (result.detach(), *gradients), strict=True))
    return {name: relative_error(value, exact[name]) for name, value in found.items()}


def measure(kernel: Kernel, shape: Shape, problem: Problem, exact: dict[str, Tensor]) -> dict[str, Any]:
    """Everything that is said of one contender at one shape."""

    def forward() -> Tensor:
        return kernel(*problem.arguments())

    wrong = errors(kernel, problem, exact)
    step = training_step(forward, list(problem.leaves.values()), problem.upstream)
    both, alone = timing(step), timing(forward)

    def later_step() -> None:
        forward().backward(problem.upstream)

    found = {
        "forward ms": asdict(alone),
        "forward TFLOP/s": shape.forward_flop / alone.median / 1e9,
        "step ms": asdict(both),
        "step TFLOP/s": 3 * shape.forward_flop / both.median / 1e9,
        "later step ms": asdict(timing(later_step)),
        "later peak MiB": peak_mib(later_step),
        "saved MiB": saved_mib(forward),
        "launches": launches(step),
        "errors": wrong,
    }
    problem.forget_gradients()
    return {**found, "peak MiB": peak_mib(step)}


def row(shape: str, name: str, found: dict[str, Any], ceiling: float) -> tuple[str, ...]:
    """One line of the table."""
    step = found["step ms"]
    return (
        shape,
        name,
        f"{found['forward TFLOP/s']:.0f}",
        f"{found['step TFLOP/s']:.0f}",
        f"{found['step TFLOP/s'] / ceiling:.0%}",
        f"{step['median']:.2f} ({step['low']:.2f} to {step['high']:.2f})",
        f"{found['later step ms']['median']:.2f}",
        f"{found['peak MiB']:.0f}",
        f"{found['later peak MiB']:.0f}",
        f"{found['saved MiB']:.0f}",
        str(found["launches"]),
        f"{found['errors']['result']:.1e}",
        f"{max(error for what, error in found['errors'].items() if what != 'result'):.1e}",
    )


COLUMNS = (
    "shape",
    "kernel",
    "forward TFLOP/s",
    "forward+backward TFLOP/s",
    "of the product ceiling",
    "step ms (20 to 80 %)",
    "later step ms",
)
MEMORY_COLUMNS = (
    "peak MiB",
    "later peak MiB",
    "saved MiB",
    "launches",
    "error of the result",
    "largest error of a gradient",
)


def ceilings() -> dict[str, float]:
    """What this GPU can do, in this run."""
    return {"product TFLOP/s": product_tflop_per_second(), "copy GB/s": copy_gb_per_second()}


def measure_shape(shape_name: str, kernels: Sequence[tuple[str, Kernel]]) -> dict[str, Any]:
    """Every contender at one shape; one that fails says why, and the others are still measured."""
    shape = SHAPES[shape_name]
    problem = Problem(shape)
    exact = problem.exact()
    results: dict[str, Any] = {}
    for name, kernel in kernels:
        gc.collect()
        torch.cuda.empty_cache()
        try:
            results[name] = measure(kernel, shape, problem, exact)
            print(f"{shape_name}: {name}: {results[name]['step TFLOP/s']:.0f} TFLOP/s", flush=True)
        except Exception as error:
            results[name] = {"failed": f"{type(error).__name__}: {error}"}
            print(f"{shape_name}: {name} failed: {type(error).__name__}: {str(error)[:200]}", flush=True)
    return {"shape": asdict(shape), "kernels": results}


def write(name: str, data: dict[str, Any]) -> None:
    """The page of what has been measured so far."""
    ceiling = data["ceilings"]["product TFLOP/s"]
    rows = [
        row(shape_name, kernel, found, ceiling)
        for shape_name, results in data["shapes"].items()
        for kernel, found in results["kernels"].items()
        if "failed" not in found
    ]
    ceilings_text = ", ".join(f"{what} {value:.0f}" for what, value in data["ceilings"].items())
    note = f"Ceilings in the same run: {ceilings_text}. Errors are relative norms against float64. "
    note += (
        "Peaks are beyond the operands, and the first counts the gradients; a later step adds to gradients that are "
    )
    note += "held already."
    columns = (*COLUMNS, *MEMORY_COLUMNS)
    write_results(name, "Mixture-of-experts MLPs, bf16", data, columns, rows, note, script="moe.py")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--skip", nargs="*", default=[], help="contenders to leave out, by their names")
    parser.add_argument("--name", default="moe_h200")
    options = parser.parse_args()
    peers = {name: importlib.metadata.version(name) for name in PEERS if _has(name)}
    data: dict[str, Any] = {"machine": machine() | peers, "ceilings": ceilings(), "shapes": {}}
    kernels = [(name, kernel) for name, kernel in contenders() if name not in options.skip]
    for shape_name in options.shapes:
        data["shapes"][shape_name] = measure_shape(shape_name, kernels)
        write(options.name, data)


def _has(distribution: str) -> bool:
    try:
        return bool(importlib.metadata.version(distribution))
    except importlib.metadata.PackageNotFoundError:
        return False


if __name__ == "__main__":
    main()
