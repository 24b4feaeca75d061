"""Sparse attention at DeepSeek-V3.2's widths, bf16: Triton and plain PyTorch beside dense attention, on one GPU.

    python benchmarks/dsa/triton_dsa.py --output dsa_h100.json            # checks, then times; 16384 tokens
    python benchmarks/dsa/triton_dsa.py --output dsa_h100.json --tokens 65536 --only triton dense

First every kernel is compared with its contract's reference in float64, on fewer tokens: choices key by key, and output
and gradients as shares of their norm. A time is the median of ``triton.testing.do_bench``, beside its 20th and 80th
percentile. Dense attention is torch's over expanded keys and values, with the choices as a mask too, and
FlashAttention 3's where it is installed. Rates count the products of the pairs that each computes. The file is written
anew after each figure. ``--tune`` times our attention alone over a grid of launches. ``--device cpu`` runs all of it on
a tiny shape, in Triton's interpreter (``TRITON_INTERPRET=1``), by the wall clock.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root, for `benchmarks`

from benchmarks.shared import memory_bound
from benchmarks.shared.accuracy import relative_error
from benchmarks.shared.results import machine, table
from benchmarks.shared.sparse_attention import flash_attention_3, timed
from veomni_conformance.triton_interpreter import mend_interpreter
from veomni_ops import dsa_attention, dsa_indexer
from veomni_ops.visible_keys import causal_ranges
from veomni_torch import dsa_attention as torch_attention
from veomni_torch import dsa_indexer as torch_indexer
from veomni_triton import dsa_attention as triton_attention
from veomni_triton import dsa_indexer as triton_indexer
from veomni_triton.dsa_attention import operators

TITLE = "Sparse attention at DeepSeek-V3.2's widths, bf16"
ATTENTION = {"triton": triton_attention.standard, "torch": torch_attention.standard}
INDEXER = {"triton": triton_indexer.standard, "torch": torch_indexer.standard}
MASKED = "sdpa, choices as a mask"  # what transformers runs
ALLOWED = 1e-2  # share of the norm, as the contract allows for bfloat16's gradients


@dataclass(frozen=True)
class Shape:
    """One sequence, and the widths of a layer."""

    tokens: int
    top_k: int
    heads: int = 128
    latent: int = 512
    rotated: int = 64
    expanded: tuple[int, int] = (192, 128)  # of keys and values of dense attention
    index_heads: int = 64
    index_width: int = 128

    @property
    def width(self) -> int:
        return self.latent + self.rotated

    @property
    def pairs(self) -> int:
        """Queries and chosen keys of a causal sequence."""
        few = min(self.tokens, self.top_k)
        return few * (few + 1) // 2 + (self.tokens - few) * self.top_k


CHECKED = Shape(640, 200)
TINY = Shape(9, 4, heads=2, latent=16, rotated=16, expanded=(16, 16), index_heads=2, index_width=16)


def index_inputs(shape: Shape, device: str) -> tuple[Any, ...]:
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(1, *size, device=device, generator=generator).bfloat16()

    query = normal(shape.tokens, shape.index_heads, shape.index_width)
    weights = normal(shape.tokens, shape.index_heads).float()
    ranges = causal_ranges(1, shape.tokens, shape.tokens).to(device)
    return query, normal(shape.tokens, shape.index_width), weights, ranges, shape.top_k


def inputs(shape: Shape, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys that require gradients, and the gradient of the output."""
    generator = torch.Generator(device).manual_seed(1)
    sizes = (
        (shape.tokens, shape.heads, shape.width),
        (shape.tokens, shape.width),
        (shape.tokens, shape.heads, shape.latent),
    )
    drawn = (torch.randn(1, *size, device=device, generator=generator).bfloat16() for size in sizes)
    query, keys, doutput = drawn
    return query.requires_grad_(), keys.requires_grad_(), doutput


def checked(name: str, shape: Shape, device: str) -> dict[str, float]:
    """Keys that are chosen otherwise than by the reference in float64, and how far output and gradients are off."""
    query, key, weights, ranges, top_k = index_inputs(shape, device)
    wanted = dsa_indexer.standard(query.double(), key.double(), weights.double(), ranges, top_k)
    found = {"other choices": float((INDEXER[name](query, key, weights, ranges, top_k) != wanted).sum())}
    query, keys, doutput = inputs(shape, device)
    results = []
    for kernel, wide in ((ATTENTION[name], False), (dsa_attention.standard, True)):
        given = [x.detach().double().requires_grad_() if wide else x for x in (query, keys)]
        output = kernel(*given, wanted, shape.expanded[0] ** -0.5, shape.latent)
        results.append([output.detach(), *torch.autograd.grad(output, given, doutput.to(output.dtype))])
    return found | dict(zip(("output", "dquery", "dkeys"), map(relative_error, *results), strict=True))


def rates(found: dict[str, Any], forward: float, backward: float) -> dict[str, Any]:
    """The figures with TFLOP/s; the products take ``forward`` and ``backward`` FLOP."""
    found["forward TFLOP/s"] = forward / found["forward"]["median"] / 1e9
    if "both" in found:
        found["TFLOP/s"] = (forward + backward) / found["both"]["median"] / 1e9
    return found


def measured_indexer(name: str, shape: Shape, device: str) -> dict[str, Any]:
    call = index_inputs(shape, device)
    flop = shape.tokens**2 * shape.index_heads * shape.index_width  # of causal pairs, two each
    return rates(timed(partial(INDEXER[name], *call), [], None, device), flop, 0)


def measured_attention(name: str, shape: Shape, device: str) -> dict[str, Any]:
    indices = INDEXER["triton"](*index_inputs(shape, device))
    query, keys, doutput = inputs(shape, device)
    forward = partial(ATTENTION[name], query, keys, indices, shape.expanded[0] ** -0.5, shape.latent)
    each = 2 * shape.pairs * shape.heads
    products = each * (shape.width + shape.latent), each * (3 * shape.width + 2 * shape.latent)
    return rates(timed(forward, [query, keys], doutput, device), *products)


def measured_dense(name: str, shape: Shape, device: str) -> dict[str, Any]:
    """Causal attention over expanded keys and values: as a model without choices has it, or with these as a mask."""
    width, value_width = shape.expanded
    sizes = (width, width, value_width, value_width)
    heads_first = name != "FA3"
    order = (shape.heads, shape.tokens) if heads_first else (shape.tokens, shape.heads)
    query, key, value, doutput = (torch.randn(1, *order, size, device=device).bfloat16() for size in sizes)
    tensors = [x.requires_grad_() for x in (query, key, value)]
    if name == MASKED:
        indices = INDEXER["triton"](*index_inputs(shape, device))[0].long()
        mask = torch.zeros(shape.tokens, shape.tokens + 1, dtype=torch.bool, device=device)
        mask.scatter_(1, indices.where(indices >= 0, shape.tokens), True)  # the last column is for what is no key
        forward = partial(F.scaled_dot_product_attention, *tensors, attn_mask=mask[:, :-1])
    elif heads_first:
        forward = partial(F.scaled_dot_product_attention, *tensors, is_causal=True)
    else:
        forward = partial(flash_attention_3, *tensors)
    each = shape.tokens**2 * shape.heads
    return rates(
        timed(forward, tensors, doutput, device), each * (width + value_width), each * (3 * width + 2 * value_width)
    )


def write(output: Path | None, data: dict[str, Any]) -> None:
    columns = ("what", "kernel", "forward ms", "forward+backward ms (20 to 80 %)", "TFLOP/s", "peak MiB")
    rows = []
    for each in data["figures"]:
        both = each.get("both")
        times = f"{both['median']:.2f} ({both['low']:.2f} to {both['high']:.2f})" if both else ""
        rate, peak = each.get("TFLOP/s", each["forward TFLOP/s"]), each.get("peak MiB")
        shown = (f"{each['forward']['median']:.2f}", times, f"{rate:.0f}", f"{peak:.0f}" if peak else "")
        rows.append((each["what"], each["name"], *shown))
    data["table"] = table(columns, rows).splitlines()
    if output:
        output.write_text(json.dumps(data, indent=1) + "\n")


def compare(shape: Shape, only: list[str], output: Path | None, device: str) -> None:
    """Check and time everything; what one raises keeps out nothing else."""
    data: dict[str, Any] = {"title": TITLE, "script": "benchmarks/dsa/triton_dsa.py", "machine": machine()}
    data |= {"shape": asdict(shape), "off": {}, "raised": {}, "figures": []}

    def attempt(what: str, name: str, call: Callable[[], Any]) -> None:
        try:
            found = call()
        except Exception as error:  # the others are measured all the same
            data["raised"][f"{what} {name}"] = f"{type(error).__name__}: {error}"[:500]
            print(f"{what} {name} raises {type(error).__name__}: {error}", flush=True)
            return
        print(what, name, found, flush=True)
        if what == "check":
            data["off"][name] = found
        else:
            data["figures"].append({"what": what, "name": name, **found})
        write(output, data)

    kernels = [name for name in ATTENTION if not only or name in only]
    for name in kernels:
        attempt("check", name, partial(checked, name, TINY if device == "cpu" else CHECKED, device))
    for name in kernels:
        attempt("indexer", name, partial(measured_indexer, name, shape, device))
        attempt("sparse attention", name, partial(measured_attention, name, shape, device))
    if not only or "dense" in only:
        for name in ("sdpa", MASKED, "FA3"):
            attempt("dense attention", name, partial(measured_dense, name, shape, device))
    print("\n".join(data.get("table", ())))
    wrong = {n: off for n, off in data["off"].items() if off.pop("other choices") or max(off.values()) > ALLOWED}
    print(f"wrong: {wrong or 'none'}; raised: {data['raised'] or 'none'}")


def compare_at(shape: Shape, only: Collection[str] | None) -> Iterator[dict[str, Any]]:
    """Our kernels of both ops at one shape, as two revisions are compared; one that is wrong stops it."""
    off = checked("triton", CHECKED, "cuda")
    if off.pop("other choices") or max(off.values()) > ALLOWED:
        raise SystemExit(f"wrong: {off}")
    found = measured_indexer("triton", shape, "cuda")
    yield {**found, "name": "indexer", "both": found["forward"]}
    yield {**measured_attention("triton", shape, "cuda"), "name": "attention"}


BENCHMARK = memory_bound.benchmark({"16384 tokens": Shape(16384, 2048)}, compare_at, ours=("indexer", "attention"))


def tune(shape: Shape, device: str) -> None:
    """Time our attention with other launches of each of its kernels."""
    for what in ("WEIGHTS", "OUTPUTS", "LOGIT_GRADIENTS", "QUERY_GRADIENTS", "KEY_GRADIENTS"):
        former = getattr(operators, what)
        for heads, keys, columns, warps, stages in itertools.product(
            *((64, 128), (64, 128, 256), (32, 64, 128, 256), (4, 8), (2, 3))
        ):
            launch = operators.Launch(heads, keys, columns, warps, stages)
            setattr(operators, what, launch)
            try:
                found = measured_attention("triton", shape, device)
            except Exception as error:  # mostly too much shared memory
                print(f"{what} {launch}: {type(error).__name__}: {str(error)[:80]}", flush=True)
                continue
            times = {name: found[name]["median"] for name in ("forward", "both")}
            print(f"{what} {launch}: {times}", flush=True)
        setattr(operators, what, former)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="a JSON file, written anew after each figure")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--top-k", type=int, default=2048)
    parser.add_argument("--only", nargs="*", default=[], help="triton, torch, dense")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    shape = Shape(args.tokens, args.top_k)
    if args.device == "cpu":
        mend_interpreter()
        shape = TINY
    if args.tune:
        tune(replace(shape, tokens=min(shape.tokens, 4096)), args.device)
    else:
        compare(shape, args.only, args.output, args.device)


if __name__ == "__main__":
    main()
