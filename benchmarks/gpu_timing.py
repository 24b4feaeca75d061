"""Times calls on a GPU and finds their peak memory: what the benchmarks of the Triton kernels share."""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton.testing import do_bench

from results import machine

Call = Callable[[], Any]


def options(description: str | None) -> argparse.Namespace:
    """The command line that these benchmarks share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--tune", action="store_true", help="time our kernels over launch parameters instead")
    parser.add_argument("--only", nargs="*", help="these contenders alone")
    parser.add_argument("--output", type=Path, help="write the figures here, as JSON")
    return parser.parse_args()


def hold(what: str, found: Tensor, exact: Tensor, allowed: float) -> None:
    """Stop unless ``norm(found - exact)`` is within ``allowed * norm(exact)``."""
    error = float((found.detach().double() - exact.detach()).norm() / exact.detach().norm())
    print(f"{what}: off by {error:.1e} of a float64 reference, allowed {allowed:.0e}")
    if not error <= allowed:
        raise SystemExit(f"{what}: wrong")


def milliseconds(call: Call, warmup: int = 25, repeat: int = 100) -> dict[str, float]:
    """Median and the 20th and 80th percentiles; the L2 cache is cleared before each call."""
    median, low, high = do_bench(call, warmup=warmup, rep=repeat, quantiles=[0.5, 0.2, 0.8])
    return {"median": median, "20%": low, "80%": high}


def peak_mib(call: Call) -> float:
    """The most memory that a call held at once, beyond what was held before it."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def copy_gb_per_second() -> float:
    """How fast 2 GiB are copied: the ceiling for kernels that are bound by memory."""
    source = torch.randn(2**30, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    return 2 * source.nbytes / milliseconds(lambda: target.copy_(source))["median"] / 1e6


def compare(
    contenders: dict[str, Call], backward: Callable[[Any], None], inputs: Sequence[Tensor]
) -> list[dict[str, Any]]:
    """Forward, forward and backward, and the peak memory of each contender; prints them as they come."""
    rows = []
    for name, forward in contenders.items():

        def both(forward: Call = forward) -> None:
            for tensor in inputs:
                tensor.grad = None
            backward(forward())

        both()
        for tensor in inputs:
            tensor.grad = None
        peak = peak_mib(both)
        times = {
            "forward ms": forward,
            "both ms": both,
            "both, as a CUDA graph, ms": captured(forward, backward, inputs),
        }
        row = {"name": name, "peak MiB": peak, **{what: milliseconds(call) for what, call in times.items() if call}}
        print(f"{name:24} {', '.join(f'{w} {_spread(row[w])}' for w in times if w in row)}, {peak:.0f} MiB", flush=True)
        rows.append(row)
    return rows


def captured(forward: Call, backward: Callable[[Any], None], inputs: Sequence[Tensor]) -> Call | None:
    """Replays forward and backward as one CUDA graph, which shows the GPU's share alone; ``None`` if it can't be."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    copies = [tensor.grad for tensor in inputs]
    try:
        with torch.cuda.stream(stream):
            for tensor in inputs:
                tensor.grad = None
            backward(forward())
            for tensor in inputs:
                tensor.grad = None
            with torch.cuda.graph(graph, stream=stream):
                backward(forward())
    except RuntimeError as error:
        print(f"not captured: {str(error).splitlines()[0]}")
        return None
    finally:
        for tensor, copy in zip(inputs, copies, strict=True):
            tensor.grad = copy
    return graph.replay


def fastest(what: str, candidates: Iterable[tuple[Any, Call]]) -> list[dict[str, Any]]:
    """Time candidates of one kernel, print the five best, and give all of them, the fastest first."""
    rows = [{"launch": str(launch), "ms": milliseconds(call, 5, 30)} for launch, call in candidates]
    rows.sort(key=lambda row: row["ms"]["median"])
    for row in rows[:5]:
        print(f"{what:24} {_spread(row['ms'])}  {row['launch']}", flush=True)
    return rows


def write(output: Path | None, shape: str, figures: dict[str, Any]) -> None:
    """Keep the figures with the machine and the shape that they hold for."""
    if output:
        output.write_text(json.dumps({"machine": machine(), "shape": shape, **figures}, indent=1) + "\n")


def _spread(times: dict[str, float]) -> str:
    return f"{times['median']:.3f} ({times['20%']:.3f} to {times['80%']:.3f}) ms"
