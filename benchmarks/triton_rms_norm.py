"""rms_norm's Triton kernels on a GPU against transformers, PyTorch, Liger and QuACK, in bfloat16, in one process.

A time is the median of ``triton.testing.do_bench``, beside its 20th and 80th percentile; it flushes the L2 cache before
each call. GB/s are of useful traffic: x and y in forward, and x, dy and dx in backward. The results and gradients of
every contender are compared with float64 first. ``--tune`` times our kernels alone over a grid of launches instead, and
prints the fastest, for the table in ``veomni_triton_moe/rms_norm/launch.py``.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from triton.testing import do_bench

from results import machine
from veomni_triton_moe import rms_norm
from veomni_triton_moe.rms_norm import whole_rows
from veomni_triton_moe.rms_norm.launch import BackwardLaunch, ForwardLaunch, backward_launch, forward_launch

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


def timed(call: Callable[[], Any], useful_bytes: int, milliseconds: int = 200) -> Figures:
    low, median, high = do_bench(call, warmup=milliseconds // 4, rep=milliseconds, quantiles=[0.2, 0.5, 0.8])
    return {"ms": median, "ms at 20%": low, "ms at 80%": high, "GB/s": useful_bytes / median / 1e6}


def shown(figures: Figures) -> str:
    spread = f"{figures['ms at 20%']:.4f} to {figures['ms at 80%']:.4f}"
    return f"{figures['GB/s']:6.0f} GB/s, {figures['ms']:.4f} ms ({spread})"


def copy_ceiling() -> Figures:
    source = torch.randn(2**30, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    return timed(lambda: target.copy_(source), 2 * source.numel() * source.element_size())


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


def errors(found: Iterable[Tensor], wanted: Iterable[Tensor]) -> Figures:
    """The distances of y, dx and dweight from float64, as a share of the norm."""
    return {
        name: float((mine.double() - exact).norm() / exact.norm())
        for name, mine, exact in zip(("y", "dx", "dweight"), found, wanted, strict=True)
    }


def forward_and_backward(norm: Norm, x: Tensor, weight: Tensor, dy: Tensor) -> None:
    x.grad = weight.grad = None
    norm(x, weight, EPS).backward(dy)


def compare(rows: int, width: int, norms: dict[str, Norm]) -> Iterator[Figures]:
    x, weight, dy = drawn(rows, width)
    doubles = (tensor.detach().double().requires_grad_() for tensor in (x, weight))
    wanted = with_gradients(in_float64, *doubles, dy)
    size = x.numel() * x.element_size()
    for name, norm in norms.items():
        found: Figures = {"rows": rows, "width": width, "name": name}
        try:
            found["errors"] = errors(with_gradients(norm, x, weight, dy), wanted)
        except Exception as error:  # a contender that can't run here must not cost the figures of the others
            print(f"{name} at {rows}x{width} is left out: {type(error).__name__}: {error}")
            continue
        found["is exact enough"] = max(found["errors"].values()) < ALLOWED
        found["forward"] = timed(partial(norm, x, weight, EPS), 2 * size)
        found["both"] = timed(partial(forward_and_backward, norm, x, weight, dy), 5 * size)
        verdict = "" if found["is exact enough"] else f"; TOO FAR FROM float64: {found['errors']}"
        print(f"{rows}x{width} {name:14}{shown(found['forward'])}; with backward {shown(found['both'])}{verdict}")
        yield found


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


def tune(rows: int, width: int) -> Iterator[Figures]:
    """The fastest launches of forward, and of backward with the sum of its partial gradients of the weight."""
    x, weight, dy = (tensor.detach() for tensor in drawn(rows, width))
    y, dx, dweight = (torch.empty_like(tensor) for tensor in (x, x, weight))
    reciprocal = torch.empty(rows, device="cuda")
    size = x.numel() * x.element_size()
    forward = partial(whole_rows.forward, x, weight, y, reciprocal, EPS, 0.0, False, True)
    backward = partial(whole_rows.backward, dy, x, weight, reciprocal, 0.0, dx, dweight)
    for name, kernel, choices, moved in zip(
        ("forward", "backward"), (forward, backward), launches(width), (2 * size, 3 * size), strict=True
    ):
        figures = [(launch, timed(partial(kernel, launch), moved, milliseconds=20)) for launch in choices]
        figures.sort(key=lambda pair: pair[1]["ms"])
        for launch, figure in figures:
            yield {"rows": rows, "width": width, "name": name, "launch": asdict(launch), **figure}
        for launch, figure in figures[:4]:
            print(f"{rows}x{width} {shown(figure)}  {launch}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="where to write the figures, as JSON")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="compare only these contenders")
    parser.add_argument("--tune", action="store_true", help="time our kernels over a grid of launches instead")
    options = parser.parse_args()
    data: Figures = {"machine": machine(), "copy": copy_ceiling()}
    print(f"copy {shown(data['copy'])}")
    if options.tune:
        data["launches"] = [row for shape in SHAPES for row in tune(*shape)]
    else:
        norms = {name: norm for name, norm in contenders().items() if name in (options.only or [name])}
        data["figures"] = [row for shape in SHAPES for row in compare(*shape, norms)]
    if options.output:
        options.output.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
