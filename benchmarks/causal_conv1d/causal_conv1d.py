"""causal_conv1d on the CPU, forward and backward: veomni-torch's kernel beside the function of transformers' models.

    python benchmarks/causal_conv1d/causal_conv1d.py

Writes ``benchmarks/results/causal_conv1d.json``. ``x`` is a transposed ``[B, S, C]``, as mixers hand it over.
Contenders take turns in several processes; a time is the median over processes of the median turn. Memory is the peak
of what PyTorch's allocator holds above the inputs. Over both passes it includes the result, its gradient and the
gradients of the inputs, which every implementation holds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root, for `benchmarks`

from benchmarks.shared.accuracy import hold
from benchmarks.shared.benchmark import Benchmark
from benchmarks.shared.in_processes import Calls, asked, figures, leaf, measured_in_processes
from benchmarks.shared.results import machine, write_results
from veomni_ops.causal_conv1d import standard as reference
from veomni_torch import causal_conv1d

MIB = 1 << 20
THEIRS, OURS = "transformers", "torch"


@dataclass(frozen=True)
class Case:
    """One row of 2048 positions."""

    channels: int
    dtype: torch.dtype
    activation: str | None = "silu"
    width: int = 4
    positions: int = 2048

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"C={self.channels} T={self.positions} W={self.width}, {self.activation or 'no activation'}, {name}"


CASES = {
    "float32": Case(2048, torch.float32),
    "bfloat16": Case(2048, torch.bfloat16),
    "wide": Case(8192, torch.bfloat16),  # Qwen3-Next's
    "short": Case(2048, torch.bfloat16, activation=None, width=3),  # LFM2's
}
ALLOWED = {torch.float32: 1e-6, torch.bfloat16: 6e-3}  # the errors of results and gradients, as norms


def contenders(case: Case, only: Collection[str] | None) -> tuple[Calls, list[Tensor]]:
    """The calls, once their results and gradients are near those of float64."""
    x = leaf(1, case.positions, case.channels, dtype=case.dtype).detach().transpose(1, 2).requires_grad_()
    weight = leaf(case.channels, case.width, scale=case.width**-0.5, dtype=case.dtype)
    calls: Calls = {
        name: partial(function, x, weight, activation=case.activation)
        for name, function in asked({THEIRS: causal_conv1d_fn, OURS: causal_conv1d.standard}, only).items()
    }
    wide = [each.detach().double().requires_grad_() for each in (x, weight)]
    exact = reference(*wide, activation=case.activation)
    upstream = torch.randn_like(exact).to(case.dtype)
    of_exact = torch.autograd.grad(exact, wide, upstream.double())
    for name, call in calls.items():
        result = call()
        hold(name, result, exact, ALLOWED[case.dtype])
        for what, found, wanted in zip(
            ("x", "weight"), torch.autograd.grad(result, (x, weight), upstream), of_exact, strict=True
        ):
            hold(f"{name}, gradient of {what}", found, wanted, 2 * ALLOWED[case.dtype])
    return calls, [x, weight]


def measure(case: Case, device: str, repeats: int, only: Collection[str] | None = None) -> dict[str, Any]:
    torch.manual_seed(0)
    calls, inputs = contenders(case, only)
    return {
        "case": str(case),
        **figures(calls, inputs, repeats),
        "bytes of all": 3 * inputs[0].nbytes + inputs[1].nbytes,
    }


BENCHMARK = Benchmark({"cpu": CASES}, measure, ours=(OURS,), repeats=7)


def row(measured: dict[str, Any]) -> tuple[str, ...]:
    memory, each = measured["peak bytes"], measured["seconds in each process"]
    ratios = [mine / theirs for mine, theirs in zip(each[OURS], each[THEIRS], strict=True)]
    return (
        measured["case"],
        *(f"{1e3 * measured['seconds'][name]:.1f} ms" for name in (THEIRS, OURS)),
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
        *(f"{memory[THEIRS][span] / MIB:.1f} / {memory[OURS][span] / MIB:.1f} MiB" for span in ("forward", "both")),
        *(f"{memory[OURS][span] / memory[THEIRS][span]:.0%}" for span in ("forward", "both")),
        f"{measured['bytes of all'] / MIB:.1f} MiB",
    )


COLUMNS = (
    "case",
    "transformers",
    "ours",
    "of its time",
    "peak in forward, theirs / ours",
    "peak over both passes",
    "share in forward",
    "share over both",
    "of which all hold",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=BENCHMARK.repeats)
    parser.add_argument("--processes", type=int, default=5)
    options = parser.parse_args()
    cases = [measured_in_processes(__file__, "cpu", name, options.repeats, options.processes) for name in CASES]
    write_results(
        "causal_conv1d",
        "The causal convolution of a mixer on the CPU, forward and backward",
        {"cases": cases, "machine": machine()},
        COLUMNS,
        map(row, cases),
        script=__file__,
    )


if __name__ == "__main__":
    main()
