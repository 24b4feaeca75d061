"""causal_conv1d's Triton kernels on a GPU against transformers, fla and causal-conv1d, in bfloat16, in one process.

    python benchmarks/causal_conv1d/triton_causal_conv1d.py --name triton_causal_conv1d_h200
    python benchmarks/causal_conv1d/triton_causal_conv1d.py --tune

A time is the median of ``triton.testing.do_bench``, beside its 20th and 80th percentile; it flushes the L2 cache before
each call. GB/s are of useful traffic: x and y in forward, and x, dy and dx in backward. The results and gradients of
every contender are compared with float64 first. Of packed sequences, only those who keep them apart are compared.
``--tune`` times our kernels alone over a grid of launches instead, and prints the fastest, for the table in
``veomni_triton/causal_conv1d/launch.py``.
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
from veomni_ops.causal_conv1d import numbered
from veomni_ops.causal_conv1d import standard as reference
from veomni_triton import causal_conv1d
from veomni_triton.causal_conv1d import channels_adjacent, positions_adjacent
from veomni_triton.causal_conv1d.launch import (
    CHANNELS_BACKWARD,
    CHANNELS_FORWARD,
    POSITIONS_BACKWARD,
    POSITIONS_FORWARD,
    Launch,
)
from veomni_triton.partial_sums import sum_partials

Convolution = Callable[[Tensor, Tensor], Tensor]
Figures = dict[str, Any]
# Shares of the norm, as the contract allows for bfloat16's values, and twice as much for gradients.
ALLOWED = 6e-3
PACKED = [1000, 3000, 1, 383, 12000]


@dataclass(frozen=True)
class Case:
    """One row of 16384 positions with four taps and SiLU, as a transposed ``[B, S, C]`` or as a ``[B, C, S]``."""

    channels: int = 8192
    packed: bool = False
    channels_first: bool = False

    def __str__(self) -> str:
        packed = f", {len(PACKED)} packed sequences" if self.packed else ""
        return f"16384 positions of {self.channels} channels" + (", channels first" * self.channels_first) + packed

    def drawn(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """x, the weight, the incoming gradient and the numbers of sequences."""
        torch.manual_seed(0)
        positions = sum(PACKED)
        x, dy = (torch.randn(1, positions, self.channels, device="cuda").bfloat16().transpose(1, 2) for _ in range(2))
        if self.channels_first:
            x, dy = x.contiguous(), dy.contiguous()
        weight = (torch.randn(self.channels, 4, device="cuda") / 2).bfloat16()
        numbers = numbered(PACKED, x.device) if self.packed else None
        return x.requires_grad_(), weight.requires_grad_(), dy, numbers


CASES = (Case(), Case(packed=True), Case(channels_first=True), Case(channels=4096))


def as_transformers(x: Tensor, weight: Tensor) -> Tensor:
    """As causal_conv1d_fn of Qwen3-Next's modeling file."""
    beyond = weight.shape[-1] - 1
    return F.silu(F.conv1d(x, weight.unsqueeze(1), padding=beyond, groups=len(weight))[:, :, : x.shape[-1]])


def contenders(case: Case, seq_idx: Tensor | None) -> dict[str, Convolution]:
    found: dict[str, Convolution] = {"ours": lambda x, weight: causal_conv1d.standard(x, weight, None, "silu", seq_idx)}
    if not case.packed:
        found["transformers"] = as_transformers
        found["torch.compile"] = torch.compile(as_transformers, dynamic=False)
    try:
        fla = import_module("fla.modules.causal_conv1d").causal_conv1d
        begins = torch.tensor([0, *itertools.accumulate(PACKED)], device="cuda") if case.packed else None
        found["fla"] = lambda x, weight: fla(x.transpose(1, 2), weight, activation="silu", cu_seqlens=begins)[
            0
        ].transpose(1, 2)
    except ImportError as error:
        print(f"fla is left out: {error}")
    try:
        # Its submodule, since a script beside this one has the package's name.
        package = import_module("causal_conv1d.causal_conv1d_interface").causal_conv1d_fn
        if not (case.packed and case.channels_first):
            found["causal-conv1d"] = lambda x, weight: package(x, weight, None, seq_idx=seq_idx, activation="silu")
    except ImportError as error:
        print(f"causal-conv1d is left out: {error}")
    return found


def check(
    case: Case, name: str, convolution: Convolution, inputs: tuple[Tensor, Tensor, Tensor, Tensor | None]
) -> None:
    """Hold a contender's result and gradients against float64, in the first 64 channels."""
    x, weight, dy, seq_idx = inputs
    some = slice(0, 64)
    doubles = [tensor.detach().double().requires_grad_() for tensor in (x[:, some], weight[some])]
    exact = reference(*doubles, None, "silu", seq_idx)
    found = convolution(x, weight)
    hold(f"{case}, {name}: y", found[:, some], exact, ALLOWED)
    of_exact = torch.autograd.grad(exact, doubles, dy[:, some].double())
    dx, dweight = torch.autograd.grad(found, (x, weight), dy)
    hold(f"{case}, {name}: gradient of x", dx[:, some], of_exact[0], 2 * ALLOWED)
    hold(f"{case}, {name}: gradient of weight", dweight[some], of_exact[1], 2 * ALLOWED)


def compare(case: Case, only: Collection[str] | None) -> Iterator[Figures]:
    inputs = case.drawn()
    x, weight, dy, seq_idx = inputs
    for name, convolution in memory_bound.selected(contenders(case, seq_idx), only).items():
        check(case, name, convolution, inputs)
        forward = partial(convolution, x, weight)
        yield memory_bound.measure(name, str(case), forward, partial(_backward, dy), (x, weight), traffic=5 * x.nbytes)


def _backward(dy: Tensor, y: Tensor) -> None:
    y.backward(dy)


# Where channels are adjacent: channels of a thread, positions of a step, warps of a multiprocessor, and stages.
FORWARD = ((2, 4, 32, 3), (4, 4, 16, 2), (4, 4, 16, 3), (4, 4, 20, 2), (4, 4, 24, 2), (4, 4, 32, 1), (4, 8, 16, 1))
FORWARD += ((4, 8, 16, 2), (8, 4, 8, 2), (8, 4, 8, 3), (8, 4, 12, 2))
BACKWARD = ((2, 4, 24, 3), (2, 4, 32, 2), (4, 4, 12, 2), (4, 4, 12, 3), (4, 4, 16, 1), (4, 4, 16, 2), (4, 4, 16, 3))
BACKWARD += ((4, 8, 12, 2), (8, 4, 8, 1), (8, 4, 8, 2), (8, 4, 8, 3))


def launches(case: Case, forms: tuple[tuple[int, ...], ...]) -> Iterator[Launch]:
    """Those of ``forms`` with programs of several sizes; where positions are adjacent, one or two vectors a thread."""
    if case.channels_first:
        for vectors, lanes, programs in itertools.product((8, 16, 32), (128, 256), (4, 5, 6, 8)):
            yield Launch(channels=lanes // vectors, step=8 * vectors, warps=4, programs=programs)
        return
    for (each, step, together, stages), warps in itertools.product(forms, (2, 4)):
        yield Launch(channels=32 * warps * each, step=step, warps=warps, programs=together // warps, stages=stages)


def tune(case: Case) -> None:
    """The fastest launches of forward, and of backward with the sums of its partial gradients."""
    x, weight, dy, seq_idx = (None if tensor is None else tensor.detach() for tensor in case.drawn())
    assert x is not None and weight is not None and dy is not None
    kernels = positions_adjacent if case.channels_first else channels_adjacent
    y, dx, dweight = (torch.empty_like(tensor) for tensor in (x, x, weight))

    def forward(launch: Launch) -> None:
        kernels.forward(x, weight, None, seq_idx, True, y, launch)

    def backward(launch: Launch) -> None:
        partials = kernels.backward(dy, x, weight, None, seq_idx, True, dx, launch)
        sum_partials(partials[:, :-1], dweight.t())

    tables = (POSITIONS_FORWARD, POSITIONS_BACKWARD) if case.channels_first else (CHANNELS_FORWARD, CHANNELS_BACKWARD)
    for what, kernel, own, forms in zip(
        ("forward", "backward"), (forward, backward), tables, (FORWARD, BACKWARD), strict=True
    ):
        choices = dict.fromkeys((own, *launches(case, forms)))
        memory_bound.fastest(f"{case} {what}", ((launch, partial(kernel, launch)) for launch in choices), keep=8)


BENCHMARK = memory_bound.benchmark({str(case): case for case in CASES}, compare, ours=("ours",))


def main() -> None:
    options = memory_bound.options(__doc__)
    if options.tune:
        for case in CASES[:3]:
            tune(case)
        return
    figures = [found for case in CASES for found in compare(case, options.only)]
    memory_bound.write(options.name, "Causal convolution with SiLU, bf16", figures, __file__)


if __name__ == "__main__":
    main()
