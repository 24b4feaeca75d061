"""rms_norm_gated's Triton kernels on a GPU against transformers and fla, in bfloat16, in one process.

    python benchmarks/rms_norm_gated/triton_rms_norm_gated.py --name triton_rms_norm_gated_h200
    python benchmarks/rms_norm_gated/triton_rms_norm_gated.py --tune

A time is the median of ``triton.testing.do_bench``, beside its 20th and 80th percentile; it flushes the L2 cache before
each call. GB/s are of useful traffic: x, the gate and y in forward, and x, the gate, dy, dx and the gate's gradient in
backward. The results and gradients of every contender are compared with float64 first. ``--tune`` times our kernels
alone over a grid of launches instead, and prints the fastest, for the table in
``veomni_triton/rms_norm_gated/launch.py``.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root, for `benchmarks`

from benchmarks.shared import memory_bound
from benchmarks.shared.accuracy import hold
from veomni_ops import rms_norm_gated as references
from veomni_triton import rms_norm_gated
from veomni_triton.rms_norm_gated import whole_groups
from veomni_triton.rms_norm_gated.form import Form
from veomni_triton.rms_norm_gated.launch import backward_launch, forward_launch
from veomni_triton.row_launches import BackwardLaunch, ForwardLaunch

Norm = Callable[[Tensor, Tensor, Tensor], Tensor]
Figures = dict[str, Any]
EPS = 1e-6
# Shares of the norm, as the contract allows for bfloat16's gradients and values.
ALLOWED = 6e-3


@dataclass(frozen=True)
class Case:
    """``rows`` rows of ``width`` columns, by a variant."""

    variant: str
    rows: int
    width: int
    group: int | None = None

    def __str__(self) -> str:
        return f"{self.variant}, {self.rows}x{self.width}" + (f" in groups of {self.group}" if self.group else "")


CASES = (
    Case("standard", 16384 * 32, 128),  # Qwen3-Next's: one row for each of a token's heads
    Case("standard", 16384, 8192),
    Case("gate_first", 16384, 8192),
    Case("gate_first", 16384, 8192, group=1024),  # Mamba 2's and Nemotron-H's
)


def silu_after(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    """As Qwen3NextRMSNormGated.forward."""
    wide = x.float()
    normal = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)
    return (normal * F.silu(gate.float())).to(x.dtype)


def silu_before(group: int | None, x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    """As MambaRMSNormGated.forward."""
    wide = (x.float() * F.silu(gate.float())).unflatten(-1, (-1, group or x.shape[-1]))
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).flatten(-2).to(x.dtype)


def contenders(case: Case) -> dict[str, Norm]:
    ours = getattr(rms_norm_gated, case.variant)
    theirs: Norm = silu_after if case.variant == "standard" else partial(silu_before, case.group)
    found: dict[str, Norm] = {
        "ours": lambda x, gate, weight: ours(x, gate, weight, EPS, case.group),
        "transformers": theirs,
        "torch.compile": torch.compile(theirs, dynamic=False),
    }
    try:
        if case.variant == "standard":
            gated = import_module("fla.modules.norm.fused_norm_gate").rms_norm_gated
            found["fla"] = lambda x, gate, weight: gated(x, gate, weight, None, activation="swish", eps=EPS)
        else:
            before = import_module("fla.modules.norm.layernorm_gated").rmsnorm_fn
            found["fla"] = lambda x, gate, weight: before(
                x, weight, None, z=gate, eps=EPS, group_size=case.group, norm_before_gate=False
            )
    except (ImportError, AttributeError) as error:
        print(f"fla is left out: {error}")
    return found


def drawn(case: Case) -> tuple[Tensor, ...]:
    """x, the gate, the weight and the incoming gradient."""
    torch.manual_seed(0)
    shapes = ((case.rows, case.width), (case.rows, case.width), (case.width,), (case.rows, case.width))
    *leaves, dy = (torch.randn(shape, device="cuda").bfloat16() for shape in shapes)
    return *(leaf.requires_grad_() for leaf in leaves), dy


def check(case: Case, name: str, norm: Norm, inputs: tuple[Tensor, ...]) -> None:
    """Hold a contender's result and gradients against float64."""
    x, gate, weight, dy = inputs
    doubles = [tensor.detach().double().requires_grad_() for tensor in (x, gate, weight)]
    exact = getattr(references, case.variant)(*doubles, EPS, case.group)
    found = norm(x, gate, weight)
    hold(f"{case}, {name}: y", found, exact, ALLOWED)
    of_exact = torch.autograd.grad(exact, doubles, dy.double())
    for what, mine, theirs in zip(
        ("x", "gate", "weight"), torch.autograd.grad(found, (x, gate, weight), dy), of_exact, strict=True
    ):
        hold(f"{case}, {name}: gradient of {what}", mine, theirs, 2 * ALLOWED)


def compare(case: Case, only: Collection[str] | None) -> Iterator[Figures]:
    inputs = drawn(case)
    x, gate, weight, dy = inputs
    for name, norm in memory_bound.selected(contenders(case), only).items():
        check(case, name, norm, inputs)
        forward, backward = partial(norm, x, gate, weight), partial(_backward, dy)
        yield memory_bound.measure(name, str(case), forward, backward, (x, gate, weight), traffic=8 * x.nbytes)


def _backward(dy: Tensor, y: Tensor) -> None:
    y.backward(dy)


def launches(width: int) -> tuple[set[ForwardLaunch], set[BackwardLaunch]]:
    """The table's, and those that give 8 to 32 elements of a tile to each thread and fill a device's registers."""
    rows = [2**power for power in range(7) if 2048 <= 2**power * width <= max(4096, width)]
    tiles = [
        (count, warps, elements)
        for count, warps in itertools.product(rows, (4, 8, 16, 32))
        if 8 <= (elements := count * width // (32 * warps)) <= 32
    ]
    forward = {ForwardLaunch(count, warps) for count, warps, _ in tiles if warps < 32}
    # About 8 registers an element, for x, the gate, dy, the weight and its gradient.
    backward = {
        BackwardLaunch(count, warps, programs, stages)
        for (count, warps, elements), programs, stages in itertools.product(tiles, (1, 2, 3, 4, 6, 8), (2, 3))
        if 192 <= programs * warps * elements <= 320
    }
    return forward | {forward_launch(width)}, backward | {backward_launch(width)}


def tune(case: Case) -> None:
    """The fastest launches of forward, and of backward with the sum of its partial gradients of the weight."""
    x, gate, weight, dy = (tensor.detach() for tensor in drawn(case))
    width = case.group or case.width
    form = Form(gate_first=case.variant == "gate_first", sigmoid=False, rounded=True)
    y, dx, dgate, dweight = (torch.empty_like(tensor) for tensor in (x, x, x, weight))
    reciprocal = torch.empty(case.rows, case.width // width, device="cuda")
    forward = partial(whole_groups.forward, x, gate, weight, y, reciprocal, EPS, form)
    backward = partial(whole_groups.backward, dy, x, gate, weight, reciprocal, form, dx, dgate, dweight)
    of_forward, of_backward = launches(width)
    for what, kernel, choices in (("forward", forward, of_forward), ("backward", backward, of_backward)):
        memory_bound.fastest(f"{case} {what}", ((launch, partial(kernel, launch)) for launch in choices))


BENCHMARK = memory_bound.benchmark({str(case): case for case in CASES}, compare, ours=("ours",))


def main() -> None:
    options = memory_bound.options(__doc__)
    if options.tune:
        for case in CASES:
            tune(case)
        return
    figures = [found for case in CASES for found in compare(case, options.only)]
    memory_bound.write(options.name, "Gated RMSNorm, bf16", figures, __file__)


if __name__ == "__main__":
    main()
