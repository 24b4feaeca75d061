"""Native sparse attention at the paper's widths, bf16, beside dense attention in the same process, on one GPU.

    python benchmarks/native_sparse/triton_native_sparse.py --output native_sparse_h100.json --tokens 32768 131072
    python benchmarks/native_sparse/triton_native_sparse.py --tune DKEYS --tokens 16384

First every kernel is compared with the contract's reference in float64, on fewer tokens: output and gradients, as
shares of their norm. A time is the median of ``triton.testing.do_bench``, beside its 20th and 80th percentile. Dense
attention is torch's over the same heads, and FlashAttention 3's where it is installed. The file is written anew after
each figure. ``--tune`` times one launch's kernels over a grid of launches. ``--device cpu`` runs all of it on a tiny
shape, in Triton's interpreter (``TRITON_INTERPRET=1``), by the wall clock.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root, for `benchmarks`

from benchmarks.shared import memory_bound
from benchmarks.shared.accuracy import relative_error
from benchmarks.shared.gpu_kernels import kernel_times
from benchmarks.shared.measuring import training_step
from benchmarks.shared.results import machine, table
from benchmarks.shared.sparse_attention import flash_attention_3, timed
from veomni_conformance.triton_interpreter import mend_interpreter
from veomni_ops import native_sparse as ops
from veomni_ops import native_sparse_samples as samples
from veomni_triton import native_sparse as ours
from veomni_triton.attention_launches import Launch
from veomni_triton.native_sparse import launches

TITLE = "Native sparse attention at the paper's widths, bf16"
ALLOWED = 2e-2  # share of the norm, as the contract allows for bfloat16's gradients
NAMES = ("output", "dquery", "dkey", "dvalue", "dcompressed_key", "dcompressed_value", "dgates")


@dataclass(frozen=True)
class Shape:
    """One sequence, and the widths of a layer."""

    tokens: int
    heads: int = 64
    groups: int = 4
    width: int = 192
    value_width: int = 128


TINY = Shape(70, 16, 1, 16, 16)
# By launch, its kernels, and the queries, keys, warps and stages to try.
GRIDS: dict[str, tuple[str, tuple[tuple[int, ...], ...]]] = {
    "FORWARD": ("range_forward_kernel", ((64, 128), (32, 64, 128), (4, 8), (2, 3))),
    "DQUERY": ("range_dquery_kernel", ((64, 128), (32, 64), (4, 8), (1, 2, 3))),
    "DKEYS": ("range_dkeys_kernel", ((32, 64, 128), (64, 128), (4, 8), (1, 2))),
    "SUMS": ("sums_kernel", ((64, 128), (64, 128), (4, 8), (2, 3))),
    "CHOSEN": ("chosen_forward_kernel", ((16,), (64,), (1, 2, 4, 8), (1, 2, 3))),
    "CHOSEN_DQUERY": ("chosen_dquery_kernel", ((16,), (64,), (1, 2, 4, 8), (1, 2, 3))),
    "CHOSEN_DKEYS": ("chosen_dkeys_kernel", ((16, 32, 64, 128), (64,), (4, 8), (1, 2, 3))),
}


def contenders(shape: Shape) -> dict[str, Callable[..., Tensor]]:
    """The kernels, of which the plain PyTorch one is too slow for long sequences."""
    kernels: dict[str, Callable[..., Tensor]] = {"native-sparse": ours.native_sparse}
    if shape.tokens <= 8192:
        kernels["torch"] = import_module("veomni_torch.native_sparse").native_sparse
    return kernels


def inputs(shape: Shape, device: str) -> tuple[Tensor, ...]:
    """Tensors that require gradients."""
    generator = torch.Generator(device).manual_seed(1)
    compressed = ops.Sizes().compressed(shape.tokens)
    sizes = (
        (shape.tokens, shape.heads, shape.width),
        (shape.tokens, shape.groups, shape.width),
        (shape.tokens, shape.groups, shape.value_width),
        (compressed, shape.groups, shape.width),
        (compressed, shape.groups, shape.value_width),
        (shape.tokens, shape.heads, 3),
    )
    drawn = [torch.randn(1, *size, device=device, generator=generator).bfloat16() for size in sizes]
    drawn[-1] = drawn[-1].sigmoid()
    return tuple(each.requires_grad_() for each in drawn)


def doutput_of(shape: Shape, device: str) -> Tensor:
    """The gradient of the output."""
    return torch.randn(1, shape.tokens, shape.heads, shape.value_width, device=device).bfloat16()


def checked(kernel: Callable[..., Tensor], shape: Shape, device: str) -> dict[str, float]:
    """How far output and gradients are off, of a call in which no choice depends on rounding."""
    sizes = samples.SMALL if device == "cpu" else ops.Sizes()
    problems = samples._Problems(torch.device(device), torch.bfloat16)
    heads, widths = (shape.heads, shape.groups), (shape.width, shape.value_width)
    call, options = problems.call(1, TINY.tokens if device == "cpu" else 1300, heads, widths, sizes)
    results = []
    for each, wide in ((kernel, False), (ops.native_sparse, True)):
        given = [x.detach().double().requires_grad_() if wide else x for x in call]
        output = each(*given, **options)
        generator = torch.Generator(device).manual_seed(2)
        doutput = torch.randn(output.shape, device=device, generator=generator).bfloat16().to(output.dtype)
        results.append([output.detach(), *torch.autograd.grad(output, given, doutput)])
    return dict(zip(NAMES, map(relative_error, *results), strict=True))


def measured(kernel: Callable[..., Tensor], shape: Shape, device: str) -> dict[str, Any]:
    tensors = inputs(shape, device)
    return timed(partial(kernel, *tensors), tensors, doutput_of(shape, device), device)


def measured_dense(name: str, shape: Shape, device: str) -> dict[str, Any]:
    """Causal attention of the same heads to every key."""
    query, key, value, *_ = (x.detach() for x in inputs(shape, device))
    doutput = doutput_of(shape, device)
    if name == "FA3":
        tensors = tuple(x.requires_grad_() for x in (query, key, value))
        return timed(partial(flash_attention_3, *tensors), tensors, doutput, device)
    # Keys are repeated beforehand, for not every one of torch's kernels takes groups; that is not timed.
    repeats = shape.heads // shape.groups
    spread = query, key.repeat_interleave(repeats, 2), value.repeat_interleave(repeats, 2)
    tensors = tuple(x.transpose(1, 2).contiguous().requires_grad_() for x in spread)
    dense = partial(F.scaled_dot_product_attention, *tensors, is_causal=True)
    return timed(dense, tensors, doutput.transpose(1, 2), device)


def write(output: Path | None, data: dict[str, Any]) -> None:
    columns = ("tokens", "kernel", "forward ms", "forward+backward ms (20 to 80 %)", "peak MiB")
    rows = []
    for each in data["figures"]:
        both, peak = each["both"], each.get("peak MiB")
        times = f"{both['median']:.2f} ({both['low']:.2f} to {both['high']:.2f})"
        shown = f"{each['forward']['median']:.2f}", times, f"{peak:.0f}" if peak else ""
        rows.append((str(each["tokens"]), each["name"], *shown))
    data["table"] = table(columns, rows).splitlines()
    if output:
        output.write_text(json.dumps(data, indent=1) + "\n")


def compare(shapes: list[Shape], only: list[str], output: Path | None, device: str) -> None:
    """Check and time everything; what one raises keeps out nothing else."""
    data: dict[str, Any] = {"title": TITLE, "script": "benchmarks/native_sparse/triton_native_sparse.py"}
    data |= {"machine": machine(), "shape": asdict(shapes[0]), "off": {}, "raised": {}, "figures": []}

    def attempt(what: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:  # the others are measured all the same
            data["raised"][what] = f"{type(error).__name__}: {error}"[:500]
            print(f"{what} raises {type(error).__name__}: {error}", flush=True)
            return None
        finally:
            torch.cuda.empty_cache()

    def wanted(name: str) -> bool:
        return not only or name in only

    for name, kernel in contenders(shapes[0]).items():
        if wanted(name) and (found := attempt(f"check {name}", partial(checked, kernel, shapes[0], device))):
            data["off"][name] = found
            print("check", name, found, flush=True)
    for shape in shapes:
        calls = {name: partial(measured, kernel, shape, device) for name, kernel in contenders(shape).items()}
        calls |= {name: partial(measured_dense, name, shape, device) for name in ("sdpa", "FA3")}
        for name, call in calls.items():
            if wanted(name) and (found := attempt(f"{name} {shape.tokens}", call)):
                print(shape.tokens, name, found, flush=True)
                data["figures"].append({"tokens": shape.tokens, "name": name, **found})
                write(output, data)
    print("\n".join(data.get("table", ())))
    wrong = {name: off for name, off in data["off"].items() if not max(off.values()) <= ALLOWED}
    print(f"wrong: {wrong or 'none'}; raised: {data['raised'] or 'none'}")


def compare_at(shape: Shape, only: Collection[str] | None) -> Iterator[dict[str, Any]]:
    """Our kernel at one shape, as two revisions are compared; if it is wrong, nothing is measured."""
    off = checked(ours.native_sparse, shape, "cuda")
    if not max(off.values()) <= ALLOWED:
        raise SystemExit(f"wrong: {off}")
    yield {**measured(ours.native_sparse, shape, "cuda"), "name": "ours"}


BENCHMARK = memory_bound.benchmark({"32768 tokens": Shape(32768)}, compare_at, ours=("ours",))


def tune(shape: Shape, names: list[str]) -> None:
    """Time the kernels of a launch with others in its place."""
    tensors = inputs(shape, "cuda")
    doutput = torch.randn_like(ours.native_sparse(*tensors))
    step = training_step(partial(ours.native_sparse, *tensors), lambda output: output.backward(doutput), tensors)
    for name in names:
        kernel, grid = GRIDS[name]
        former, found = getattr(launches, name), []
        for numbers in itertools.product(*grid):
            launch = Launch(*numbers)
            setattr(launches, name, launch)
            try:
                step()
                took = sum(ms for each, ms in kernel_times(step).items() if each.startswith(kernel))
            except Exception as error:  # mostly too much shared memory
                print(f"{name} {launch}: {type(error).__name__}: {str(error)[:80]}", flush=True)
                continue
            found.append((took, launch))
            print(f"{name} {launch}: {took:.3f} ms", flush=True)
        setattr(launches, name, former)
        print(f"best of {name}, now {former}:", *sorted(found, key=lambda each: each[0])[:3], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="a JSON file, written anew after each figure")
    parser.add_argument("--tokens", type=int, nargs="*", default=[32768])
    parser.add_argument("--heads", type=int, nargs=2, default=[64, 4], help="of queries, and of keys")
    parser.add_argument("--widths", type=int, nargs=2, default=[192, 128], help="of keys, and of values")
    parser.add_argument("--only", nargs="*", default=[], help="native-sparse, torch, sdpa, FA3")
    parser.add_argument("--tune", nargs="*", choices=GRIDS, help="which launches; all without a name")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    shapes = [Shape(tokens, *args.heads, *args.widths) for tokens in args.tokens]
    if args.device == "cpu":
        mend_interpreter()
        shapes = [TINY]
    if args.tune is not None:
        tune(replace(shapes[0], tokens=min(shapes[0].tokens, 16384)), args.tune or list(GRIDS))
    else:
        compare(shapes, args.only, args.output, args.device)


if __name__ == "__main__":
    main()
