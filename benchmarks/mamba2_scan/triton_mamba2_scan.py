"""The Triton kernels of Mamba 2's scan against mamba-ssm and plain PyTorch, in bf16, in one process.

    python benchmarks/mamba2_scan/triton_mamba2_scan.py --name triton_mamba2_scan_h100

A time is the median of ``triton.testing.do_bench``, beside its 20th and 80th percentile. First the results and all
gradients of every contender are compared with the recurrence in float64, on fewer tokens. One that is wrong there is
timed all the same, and the note names it. The file is written anew after each figure. ``--peers`` names a folder with
mamba-ssm's sources (``mamba_ssm``, and ``einops`` where it is not installed), for a machine where the package is not
built: its Triton kernels need no more. ``--peer-configs 2`` lets each of its kernels search among its first two
launches alone, and compares it with float64 at one shape. ``--device cpu`` runs everything on a tiny shape, in Triton's
interpreter (``TRITON_INTERPRET=1``), by the wall clock. ``--tune`` times our kernels alone over a grid of launches
instead, and prints the fastest, for the table in ``veomni_triton/mamba2_scan/launch.py``; ``--only`` names kernels.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root, for `benchmarks`

from benchmarks.shared import accuracy, memory_bound
from benchmarks.shared.gpu_kernels import kernel_times
from benchmarks.shared.measuring import captured, milliseconds, timing, training_step
from benchmarks.shared.memory import peak_mib_of_step, saved_mib
from benchmarks.shared.results import machine, write_results
from veomni_conformance.triton_interpreter import mend_interpreter
from veomni_ops.mamba2_scan import standard as recurrence
from veomni_torch import mamba2_scan as plain
from veomni_triton import mamba2_scan as ours
from veomni_triton.mamba2_scan import launch as table
from veomni_triton.mamba2_scan.launch import Launch, Launches

Scan = Callable[..., Any]
NAMES = ("output", "dx", "ddt", "dA", "dB", "dC", "dD", "ddt_bias")
ALLOWED = 2e-2  # share of the norm, as the contract allows for bfloat16's gradients


@dataclass(frozen=True)
class Shape:
    """A batch, and the scan of one layer."""

    name: str
    batch: int
    tokens: int
    heads: int
    groups: int
    widths: tuple[int, int]  # of a head and of a state
    chunk: int = 256  # of mamba-ssm; ours has one of its own
    sequences: int = 1  # packed into each row

    def __str__(self) -> str:
        packed = f" of {self.sequences} packed" if self.sequences > 1 else ""
        return f"{self.name}, {self.batch} x {self.tokens}{packed}"


SHAPES = (
    Shape("Bamba", 2, 4096, 128, 1, (64, 128)),
    Shape("Bamba", 2, 4096, 128, 1, (64, 128), sequences=12),
    Shape("Falcon-H1", 2, 4096, 32, 2, (128, 256)),
    Shape("Nemotron-H", 2, 4096, 128, 8, (64, 128), chunk=128),
    Shape("Nemotron-H of 80", 2, 4096, 112, 8, (80, 128), chunk=128),
)
CHECKED = (
    Shape("Bamba", 1, 515, 8, 1, (64, 128)),
    Shape("Falcon-H1", 1, 515, 4, 2, (128, 256), sequences=3),
    Shape("Nemotron-H of 80", 1, 515, 8, 4, (80, 128), chunk=128, sequences=3),
)
TINY = Shape("tiny", 1, 40, 2, 1, (16, 16), chunk=16, sequences=2)


def drawn(shape: Shape, device: str) -> tuple[list[Tensor], dict[str, Any], Tensor]:
    """x, dt, A, B, C, D and the bias, the options of a call, and the gradient of its output."""
    generator = torch.Generator(device).manual_seed(0)
    tokens, (width, state) = (shape.batch, shape.tokens), shape.widths

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*size, device=device, generator=generator) * scale).bfloat16()

    x, dout = (normal(*tokens, shape.heads, width) for _ in range(2))
    B, C = (normal(*tokens, shape.groups, state, scale=state**-0.5) for _ in range(2))
    A = -torch.linspace(1.0, 16.0, shape.heads, device=device)
    bias = torch.linspace(-6.0, -2.0, shape.heads, device=device)  # steps from 0.002 to 0.13, as a model begins with
    inputs = [x, normal(*tokens, shape.heads, scale=0.5), A, B, C, torch.ones(shape.heads, device=device), bias]
    options: dict[str, Any] = {"dt_softplus": True}
    if shape.sequences > 1:
        numbers = torch.arange(shape.tokens, device=device) * shape.sequences // shape.tokens
        options["seq_idx"] = numbers.int().expand(shape.batch, -1).contiguous()
    return [each.requires_grad_() for each in inputs], options, dout


def package(folder: Path | None, configs: int | None = None) -> Scan:
    """mamba-ssm's function: the installed one, or that of sources in ``folder``; its kernels have so many launches.

    Raises:
        ImportError: neither is there, or it can't be imported.
    """
    if folder:
        sys.path.append(str(folder))
        # Without running the packages' own __init__, which imports extensions in C++.
        for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton", "mamba_ssm.utils"):
            module = ModuleType(name)
            module.__path__ = [str(folder / name.replace(".", "/"))]
            sys.modules[name] = module
    autotune, most = triton.autotune, configs
    with patch.object(triton, "autotune", lambda configs, **others: autotune(configs=configs[:most], **others)):
        found: Scan = importlib.import_module("mamba_ssm.ops.triton.ssd_combined").mamba_chunk_scan_combined
    return found


def contenders(peers: Path | None = None, configs: int | None = None) -> dict[str, Callable[[Shape], Scan]]:
    """What gives the scan of a shape: ``scan(x, dt, A, B, C, D, bias, **options)``, with the output."""

    def on_inputs(scan: Callable[..., Any]) -> Callable[[Shape], Scan]:
        def called(
            x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, bias: Tensor, **options: Any
        ) -> Any:
            result = scan(x, dt, A, B, C, D=D, dt_bias=bias, **options)
            return result[0] if isinstance(result, tuple) else result

        return lambda shape: called

    found = {"ours": on_inputs(ours.standard), "chunked_scan": on_inputs(plain.standard)}
    try:
        scan = package(peers, configs)
    except Exception as error:  # whatever an import of another library runs into keeps it out
        print(f"mamba-ssm is left out: {type(error).__name__}: {error}", flush=True)
    else:
        found["mamba-ssm"] = lambda shape: on_inputs(partial(scan, chunk_size=shape.chunk))(shape)
    return found


def with_gradients(scan: Scan, inputs: list[Tensor], options: dict[str, Any], dout: Tensor) -> list[Tensor]:
    output = scan(*inputs, **options)
    return [output.detach(), *torch.autograd.grad(output, inputs, dout.to(output.dtype))]


def errors(name: str, contender: Callable[[Shape], Scan], shape: Shape, device: str) -> dict[str, float] | str:
    """How far results and gradients are from the recurrence in float64; or why there are none."""
    inputs, options, dout = drawn(shape, device)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    exact = with_gradients(contenders_reference(), wide, options, dout)
    scan = contender(shape)
    return accuracy.errors(f"{name} at {shape}", NAMES, lambda: with_gradients(scan, inputs, options, dout), exact)


def contenders_reference() -> Scan:
    """The contract's recurrence."""

    def called(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, bias: Tensor, **options: Any) -> Any:
        return recurrence(x, dt, A, B, C, D=D, dt_bias=bias, **options)[0]

    return called


def measure(name: str, scan: Scan, shape: Shape, device: str) -> dict[str, Any]:
    inputs, options, dout = drawn(shape, device)
    forward = partial(scan, *inputs, **options)

    def backward(output: Tensor) -> None:
        output.backward(dout.to(output.dtype))

    both = training_step(forward, backward, inputs)
    found: dict[str, Any] = {"name": name, "shape": str(shape)}
    found |= {"forward": milliseconds(forward, device, rep=100), "both": milliseconds(both, device)}
    if device == "cpu":
        print(found, flush=True)
        return found
    found |= {"peak MiB": peak_mib_of_step(both, inputs), "saved MiB": saved_mib(forward)}
    print(found, flush=True)
    if replay := captured(both):
        found["graph"] = asdict(timing(replay))
    found["kernels ms"] = kernel_times(both)
    for kernel, took in list(found["kernels ms"].items())[:12]:
        print(f"    {took:.3f} ms {kernel[:90]}", flush=True)
    return found


def row(found: dict[str, Any]) -> tuple[str, ...]:
    both = found["both"]
    return (
        found["shape"],
        found["name"],
        f"{found['forward']['median']:.2f}",
        f"{both['median']:.2f} ({both['low']:.2f} to {both['high']:.2f})",
        f"{found['graph']['median']:.2f}" if "graph" in found else "",
        *(f"{found[what]:.0f}" if what in found else "" for what in ("saved MiB", "peak MiB")),
    )


def compare(name: str | None, only: list[str] | None, device: str, peers: Path | None, configs: int | None) -> None:
    """Measure every contender at every shape; what one of them raises keeps it out there, and no other."""
    found = memory_bound.selected(contenders(peers, configs), only)
    checked, shapes = (CHECKED, SHAPES) if device == "cuda" else ((TINY,), (TINY,))
    data: dict[str, Any] = {
        "machine": machine(),
        "launches of mamba-ssm's kernels": configs or "all",
        "errors": {},
        "raised": {},
        "figures": [],
    }
    for each, contender in found.items():
        of = checked[:1] if configs and each == "mamba-ssm" else checked
        data["errors"][each] = {str(shape): errors(each, contender, shape, device) for shape in of}
    for shape, (each, contender) in itertools.product(shapes, found.items()):
        try:
            data["figures"].append(measure(each, contender(shape), shape, device))
        except Exception as error:  # the others are measured all the same
            data["raised"][f"{each} at {shape}"] = f"{type(error).__name__}: {error}"[:500]
            print(f"{each} at {shape} raises {type(error).__name__}: {error}", flush=True)
        if name:
            write(name, data)
        if device == "cuda":
            torch.cuda.empty_cache()


def write(name: str, data: dict[str, Any]) -> None:
    """The result file of what was measured."""
    columns = ("shape", "kernel", "forward ms", "forward+backward ms (20 to 80 %)", "as a CUDA graph, ms")
    wrong = {
        f"{each} at {shape}: {off}"
        for each, found in data["errors"].items()
        for shape, off in found.items()
        if isinstance(off, str) or any(not error <= ALLOWED for error in off.values())
    }
    place = data["machine"].get("gpu", "CPU x").split()[1]
    write_results(
        name,
        f"The scan of Mamba 2, bf16, {place}",
        data,
        (*columns, "saved MiB", "peak MiB"),
        [row(found) for found in data["figures"]],
        f"More than {ALLOWED} off: {'; '.join(sorted(wrong)) or 'none'}. Not timed: {data['raised'] or 'none'}.",
        script=__file__,
    )


def compare_at(shape: Shape, only: Collection[str] | None) -> Iterator[dict[str, Any]]:
    """The chosen contenders at one shape; one that is wrong stops it."""
    for name, contender in memory_bound.selected(contenders(), only).items():
        off = errors(name, contender, CHECKED[0], "cuda")
        if isinstance(off, str) or max(off.values()) > ALLOWED:
            raise SystemExit(f"{name}: wrong: {off}")
        yield measure(name, contender(shape), shape, "cuda")


BENCHMARK = memory_bound.benchmark({str(shape): shape for shape in SHAPES}, compare_at, ours=("ours",))


def candidates() -> Iterator[tuple[str, Launches]]:
    """The table's launches with one kernel's changed, by the kernel's name."""
    for field in fields(Launches):
        if field.name in ("chunk", "scores"):
            continue
        slices = (8, 16) if field.name in ("pair_gradients", "product_gradients") else (1,)
        limits = ((4, None), (4, 168), (8, None), (8, 128))
        for states, stages, heads, (warps, registers) in itertools.product((64, 128), (1, 2, 3), slices, limits):
            launch = Launch(64, states, warps, stages, heads, registers)
            yield field.name, replace(table.SIXTEEN_BITS, **{field.name: launch})


def kernel_milliseconds(what: str, launches: Launches, shape: Shape, repeats: int = 3) -> float:
    """The time of one kernel in forward and backward."""
    table.SIXTEEN_BITS = launches
    inputs, options, dout = drawn(shape, "cuda")
    times = []
    for _ in range(repeats):
        found = kernel_times(partial(with_gradients, _own, inputs, options, dout))
        times.append(sum(milliseconds for kernel, milliseconds in found.items() if kernel == f"{what}_kernel"))
    return sorted(times)[repeats // 2]


def _own(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, bias: Tensor, **options: Any) -> Tensor:
    return ours.standard(x, dt, A, B, C, D=D, dt_bias=bias, **options)[0]


def compiled(candidate: tuple[str, Launches]) -> str:
    """Compile a candidate's kernels into Triton's cache on disk; the reason if they can't be."""
    table.SIXTEEN_BITS = candidate[1]
    try:
        inputs, options, dout = drawn(replace(SHAPES[0], tokens=128), "cuda")
        with_gradients(_own, inputs, options, dout)
        torch.cuda.synchronize()
    except Exception as error:  # whatever keeps it from running keeps it out of the table
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return ""


def tune(only: list[str] | None) -> None:
    every = [each for each in candidates() if not only or each[0] in only]
    # Compiling is what takes time, and each process can do it.
    with ProcessPoolExecutor(14, mp_context=get_context("spawn")) as pool:
        reasons = list(pool.map(compiled, every))
    print("compiled", flush=True)
    for what in dict.fromkeys(name for name, _ in every):
        times = []
        for (name, launches), reason in zip(every, reasons, strict=True):
            if name == what and not reason:
                times.append((kernel_milliseconds(what, launches, SHAPES[0]), getattr(launches, what)))
        for took, launch in sorted(times, key=lambda pair: pair[0])[:6]:
            print(f"{what} {took:.3f} ms {launch}", flush=True)
    for (name, launches), reason in zip(every, reasons, strict=True):
        if reason:
            print(f"{name} {getattr(launches, name)}: {reason[:150]}")


def main() -> None:
    parser = memory_bound.parser(__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--peers", type=Path, help="a folder with mamba-ssm's sources, instead of the package")
    parser.add_argument("--peer-configs", type=int, help="launches that each of mamba-ssm's kernels chooses from")
    options = parser.parse_args()
    if options.device == "cpu":
        mend_interpreter()
    if options.tune:
        tune(options.only)
    else:
        compare(options.name, options.only, options.device, options.peers, options.peer_configs)


if __name__ == "__main__":
    main()
