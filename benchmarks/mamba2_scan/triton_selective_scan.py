"""The Triton kernels of Mamba 1's scan against transformers' loop, mamba-ssm and plain PyTorch, in bf16.

    python benchmarks/mamba2_scan/triton_selective_scan.py --name triton_selective_scan_h100

A time is the median of ``triton.testing.do_bench``, beside its 20th and 80th percentile. First the results and all
gradients of every contender are compared with the recurrence in float64, on fewer tokens. One that is wrong there is
timed all the same, and the note names it. Inputs lie in memory as a mixer of transformers makes them: ``x`` with tokens
side by side, the others with channels. transformers' loop is timed on 512 tokens and not on more, of which it keeps
all states. mamba-ssm's kernels are CUDA, and are measured where the package is installed. ``--sweep`` times our kernels
alone at each of some launches, for ``veomni_triton/selective_scan/launch.py``. ``--device cpu`` runs everything on a
tiny shape, in Triton's interpreter (``TRITON_INTERPRET=1``), by the wall clock.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root, for `benchmarks`

from benchmarks.shared import accuracy, memory_bound
from benchmarks.shared.gpu_kernels import kernel_times
from benchmarks.shared.measuring import milliseconds, training_step
from benchmarks.shared.memory import peak_mib_of_step, saved_mib
from benchmarks.shared.results import machine, write_results
from veomni_conformance.triton_interpreter import mend_interpreter
from veomni_ops.selective_scan import standard as recurrence
from veomni_torch import selective_scan as plain
from veomni_triton import selective_scan as ours
from veomni_triton.selective_scan import operators
from veomni_triton.selective_scan.launch import Launch

Scan = Callable[..., Tensor]
NAMES = ("output", "dx", "ddt", "dA", "dB", "dC", "dD", "dz", "ddt_bias")
ALLOWED = 2e-2  # share of the norm, as the contract allows for bfloat16's gradients


@dataclass(frozen=True)
class Shape:
    """A batch, and the scan of one layer."""

    name: str
    batch: int
    tokens: int
    channels: int
    state: int = 16

    def __str__(self) -> str:
        return f"{self.name}, {self.batch} x {self.tokens}, {self.channels} channels, states of {self.state}"


SHAPES = (
    Shape("Falcon-Mamba", 2, 4096, 8192),
    Shape("Mamba 130M", 1, 4096, 1536),
    Shape("Falcon-Mamba", 2, 512, 8192),
)
CHECKED = Shape("Falcon-Mamba", 1, 131, 512)
TINY = Shape("tiny", 1, 11, 35, 8)
MOST_LOOPED = 1024  # tokens: transformers' loop keeps 4 GiB of states for each 512 of the largest shape


def drawn(shape: Shape, device: str) -> tuple[list[Tensor], Tensor]:
    """x, dt, A, B, C, D, z and the bias, and the gradient of the output."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*size, device=device, generator=generator) * scale).bfloat16()

    tokens = (shape.batch, shape.tokens)
    x = normal(shape.batch, shape.channels, shape.tokens)
    dt, z, dout = (normal(*tokens, shape.channels).mT for _ in range(3))
    B, C = (normal(*tokens, shape.state).mT for _ in range(2))
    A = -torch.arange(1.0, shape.state + 1, device=device).repeat(shape.channels, 1)
    bias = torch.linspace(-6.0, -2.0, shape.channels, device=device)  # steps from 0.002 to 0.13, as a model begins with
    inputs = [x, dt * 0.5, A, B, C, torch.ones(shape.channels, device=device), z, bias]
    return [each.requires_grad_() for each in inputs], dout


def contenders() -> dict[str, Scan]:
    """Scans by name: ``scan(x, dt, A, B, C, D, z, bias)``, with the output."""
    from transformers.models.falcon_mamba import modeling_falcon_mamba

    loop = inspect.unwrap(modeling_falcon_mamba.mamba_selective_scan)
    found: dict[str, Scan] = {
        "ours": partial(_of_op, ours.standard),
        "chunked_scan": partial(_of_op, plain.standard),
        "transformers": lambda *inputs: loop(*inputs, delta_softplus=True),
    }
    try:
        from mamba_ssm.ops.selective_scan_interface import selective_scan_fn
    except Exception as error:  # whatever an import of another library runs into keeps it out
        print(f"mamba-ssm is left out: {type(error).__name__}: {error}", flush=True)
    else:
        found["mamba-ssm"] = lambda *inputs: selective_scan_fn(*inputs, delta_softplus=True)
    return found


def _of_op(scan: Callable[..., Any], *inputs: Tensor) -> Tensor:
    x, dt, A, B, C, D, z, bias = inputs
    output: Tensor = scan(x, dt, A, B, C, D, z, bias, dt_softplus=True)[0]
    return output


def with_gradients(scan: Scan, inputs: list[Tensor], dout: Tensor) -> list[Tensor]:
    output = scan(*inputs)
    return [output.detach(), *torch.autograd.grad(output, inputs, dout.to(output.dtype))]


def errors(name: str, scan: Scan, shape: Shape, device: str) -> dict[str, float] | str:
    """How far results and gradients are from the recurrence in float64; or why there are none."""
    inputs, dout = drawn(shape, device)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    exact = with_gradients(partial(_of_op, recurrence), wide, dout)
    return accuracy.errors(f"{name} at {shape}", NAMES, lambda: with_gradients(scan, inputs, dout), exact)


def measure(name: str, scan: Scan, shape: Shape, device: str) -> dict[str, Any]:
    inputs, dout = drawn(shape, device)
    forward = partial(scan, *inputs)
    both = training_step(forward, lambda output: output.backward(dout.to(output.dtype)), inputs)
    found: dict[str, Any] = {"name": name, "shape": str(shape)}
    found |= {"forward": milliseconds(forward, device, rep=100), "both": milliseconds(both, device)}
    if device == "cpu":
        print(found, flush=True)
        return found
    found |= {"peak MiB": peak_mib_of_step(both, inputs), "saved MiB": saved_mib(forward)}
    found["kernels ms"] = dict(itertools.islice(kernel_times(both).items(), 12))
    print(found, flush=True)
    return found


def row(found: dict[str, Any]) -> tuple[str, ...]:
    both = found["both"]
    return (
        found["shape"],
        found["name"],
        f"{found['forward']['median']:.2f}",
        f"{both['median']:.2f} ({both['low']:.2f} to {both['high']:.2f})",
        *(f"{found[what]:.0f}" if what in found else "" for what in ("saved MiB", "peak MiB")),
    )


def compare(name: str | None, device: str) -> None:
    """Measure every contender at every shape; what one of them raises keeps it out there, and no other."""
    found, shapes = contenders(), SHAPES if device == "cuda" else (TINY,)
    data: dict[str, Any] = {"machine": machine(), "errors": {}, "raised": {}, "figures": []}
    for each, scan in found.items():
        data["errors"][each] = errors(each, scan, CHECKED if device == "cuda" else TINY, device)
    for shape, (each, scan) in itertools.product(shapes, found.items()):
        if each == "transformers" and shape.tokens > MOST_LOOPED:
            continue
        try:
            data["figures"].append(measure(each, scan, shape, device))
        except Exception as error:  # the others are measured all the same
            data["raised"][f"{each} at {shape}"] = f"{type(error).__name__}: {error}"[:500]
            print(f"{each} at {shape} raises {type(error).__name__}: {error}", flush=True)
        if name:
            write(name, data)
        if device == "cuda":
            torch.cuda.empty_cache()


def write(name: str, data: dict[str, Any]) -> None:
    """The result file of what was measured."""
    wrong = {
        f"{each}: {off}"
        for each, off in data["errors"].items()
        if isinstance(off, str) or any(not error <= ALLOWED for error in off.values())
    }
    place = data["machine"].get("gpu", "CPU x").split()[1]
    write_results(
        name,
        f"The scan of Mamba 1, bf16, {place}",
        data,
        ("shape", "kernel", "forward ms", "forward+backward ms (20 to 80 %)", "saved MiB", "peak MiB"),
        [row(found) for found in data["figures"]],
        f"More than {ALLOWED} off: {'; '.join(sorted(wrong)) or 'none'}. Not timed: {data['raised'] or 'none'}.",
        script=__file__,
    )


def compare_at(shape: Shape, only: Collection[str] | None) -> Iterator[dict[str, Any]]:
    """The chosen contenders at one shape; one that is wrong stops it."""
    for name, scan in memory_bound.selected(contenders(), only).items():
        off = errors(name, scan, CHECKED, "cuda")
        if isinstance(off, str) or max(off.values()) > ALLOWED:
            raise SystemExit(f"{name}: wrong: {off}")
        yield measure(name, scan, shape, "cuda")


BENCHMARK = memory_bound.benchmark({str(shape): shape for shape in SHAPES}, compare_at, ours=("ours",))


def sweep() -> None:
    """The time of each of our two kernels at some launches, at the first shape."""
    inputs, dout = drawn(SHAPES[0], "cuda")
    for channels, tokens in ((32, 2), (32, 4), (32, 8), (64, 1), (64, 2), (16, 4)):
        operators.OUTPUTS = operators.GRADIENTS = Launch(channels, channels * 16 * tokens)
        times = kernel_times(partial(with_gradients, partial(_of_op, ours.standard), inputs, dout))
        found = {kernel: round(ms, 3) for kernel, ms in times.items() if kernel.startswith(("outputs", "gradients"))}
        print(f"{channels} channels, {tokens} tokens: {found}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", help="write benchmarks/results/NAME.json")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--sweep", action="store_true")
    given = parser.parse_args()
    if given.device == "cpu":
        mend_interpreter()
    if given.sweep:
        sweep()
    else:
        compare(given.name, given.device)


if __name__ == "__main__":
    main()
