"""rms_norm's Triton kernels on a GPU against transformers, PyTorch, Liger and QuACK, in bfloat16, in one process.

A time is the median of ``triton.testing.do_bench``, beside its 20th and 80th percentile; it flushes the L2 cache before
each call. GB/s are of useful traffic: x and y in forward, and x, dy and dx in backward. The results and gradients of
every contender are compared with float64 first. ``--tune`` times our kernels alone over a grid of launches instead, and
prints the fastest, for the table in ``veomni_triton/rms_norm/launch.py``.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Collection, Iterator
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
from veomni_triton import rms_norm
from veomni_triton.rms_norm import whole_rows
from veomni_triton.rms_norm.launch import backward_launch, forward_launch
from veomni_triton.row_launches import BackwardLaunch, ForwardLaunch

Norm = Callable[[Tensor, Tensor, float], Tensor]
Figures = dict[str, Any]
SHAPES = ((16384, 2048), (16384, 4096), (8192, 8192), (16384 * 32, 128))
EPS = 1e-6
ALLOWED = 6e-3  # share of the norm, as the contract allows for bfloat16's gradients


def transformers_eager(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As LlamaRMSNorm.forward."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def contenders() -> dict[str, Norm]:
    found: dict[str, Norm] = {
        "ours": rms_norm.standard,
        "transformers": transformers_eager,
        "torch.compile": torch.compile(transformers_eager, dynamic=False),
        "torch": lambda x, weight, eps: F.rms_norm(x, x.shape[-1:], weight, eps),
    }
    try:
        liger = import_module("liger_kernel.ops.rms_norm").LigerRMSNormFunction
        found["Liger"] = lambda x, weight, eps: liger.apply(x, weight, eps, 0.0, "llama", False)
    except ImportError as error:
        print(f"Liger is left out: {error}")
    try:
        quack = import_module("quack.rmsnorm").rmsnorm
        found["QuACK"] = lambda x, weight, eps: quack(x, weight, eps=eps)
    except ImportError as error:
        print(f"QuACK is left out: {error}")
    return found


def drawn(rows: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, the weight and the incoming gradient."""
    torch.manual_seed(0)
    x, weight, dy = (torch.randn(shape, device="cuda").bfloat16() for shape in ((rows, width), (width,), (rows, width)))
    return x.requires_grad_(), weight.requires_grad_(), dy


def with_gradients(norm: Norm, x: Tensor, weight: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    y = norm(x, weight, EPS)
    return (y.detach(), *torch.autograd.grad(y, (x, weight), dy.to(y.dtype)))


def in_float64(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))


def check(name: str, norm: Norm, x: Tensor, weight: Tensor, dy: Tensor) -> None:
    """Hold a contender's result and gradients against float64."""
    doubles = (tensor.detach().double().requires_grad_() for tensor in (x, weight))
    exact = with_gradients(in_float64, *doubles, dy)
    found = with_gradients(norm, x, weight, dy)
    for what, mine, theirs in zip(("y", "dx", "dweight"), found, exact, strict=True):
        hold(f"{name}: {what}", mine, theirs, ALLOWED)


def compare(size: tuple[int, int], only: Collection[str] | None) -> Iterator[Figures]:
    x, weight, dy = drawn(*size)
    for name, norm in memory_bound.selected(contenders(), only).items():
        check(name, norm, x, weight, dy)
        forward = partial(norm, x, weight, EPS)
        shape = "{}x{}".format(*size)
        yield memory_bound.measure(name, shape, forward, partial(_backward, dy), (x, weight), traffic=5 * x.nbytes)


def _backward(dy: Tensor, y: Tensor) -> None:
    y.backward(dy)


def launches(width: int) -> tuple[list[ForwardLaunch], list[BackwardLaunch]]:
    """The table's, and those that give 8 to 32 elements of a row to each thread and fill the registers of a device."""
    rows = [2**power for power in range(6) if 2048 <= 2**power * width <= max(4096, width)]
    tiles = [
        (count, warps, elements)
        for count, warps in itertools.product(rows, (4, 8, 16, 32))
        if 8 <= (elements := count * width // (32 * warps)) <= 32
    ]
    forward = {ForwardLaunch(count, warps) for count, warps, _ in tiles if warps < 32}
    # 8 registers an element, for x, dy, the weight and its gradient, and 65536 / 32 / 8 of them on a multiprocessor.
    backward = {
        BackwardLaunch(count, warps, programs, stages)
        for (count, warps, elements), programs, stages in itertools.product(tiles, (1, 2, 3, 4, 6), (1, 2, 3))
        if 256 <= programs * warps * elements <= 384
    }
    return [*forward | {forward_launch(width, 2)}], [*backward | {backward_launch(width, 2)}]


def tune(rows: int, width: int) -> None:
    """The fastest launches of forward, and of backward with the sum of its partial gradients of the weight."""
    x, weight, dy = (tensor.detach() for tensor in drawn(rows, width))
    y, dx, dweight = (torch.empty_like(tensor) for tensor in (x, x, weight))
    reciprocal = torch.empty(rows, device="cuda")
    forward = partial(whole_rows.forward, x, weight, y, reciprocal, EPS, 0.0, False, True)
    backward = partial(whole_rows.backward, dy, x, weight, reciprocal, 0.0, dx, dweight)
    forward_launches, backward_launches = launches(width)
    for what, kernel, choices in (("forward", forward, forward_launches), ("backward", backward, backward_launches)):
        memory_bound.fastest(
            f"{rows}x{width} {what}", ((launch, partial(kernel, launch)) for launch in choices), keep=4
        )


BENCHMARK = memory_bound.benchmark({"{}x{}".format(*size): size for size in SHAPES}, compare, ours=("ours",))


def main() -> None:
    options = memory_bound.options(__doc__)
    if options.tune:
        for shape in SHAPES:
            tune(*shape)
        return
    figures = [found for shape in SHAPES for found in compare(shape, options.only)]
    memory_bound.write(options.name, "RMSNorm, bf16", figures, __file__)


if __name__ == "__main__":
    main()
