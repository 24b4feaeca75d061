"""The FlashAttention adapters on one GPU against the library's own call and torch's attention, causal, in bf16."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root, for `benchmarks`

from benchmarks.attention.flops import causal_flops
from benchmarks.shared.accuracy import relative_error
from benchmarks.shared.ceilings import product_tflop_per_second
from benchmarks.shared.measuring import timing, training_step
from benchmarks.shared.memory import peak_mib_of_step
from benchmarks.shared.results import machine, write_results
from veomni_flash_attn.plugin import veomni_kernels
from veomni_ops.attention import AttentionModule, standard

BATCH, LENGTH, Q_HEADS, K_HEADS = 2, 8192, 32, 8
WIDTHS = (128, 64)
PACKED = (1, 4096, 37, 6000, 2202, 4048)  # 16384 tokens in six sequences
PACKED_WIDTH = 128
LIBRARIES = {
    "flash_attention_2": ("flash-attn", "flash_attn"),
    "flash_attention_3": ("flash-attn-3", "flash_attn_interface"),
    "flash_attention_4": ("flash-attn-4", "flash_attn.cute"),
}
COLUMNS = ("input", "kernel", "forward+backward ms (20 to 80 %)", "TFLOP/s", "of the library's time", "peak MiB")

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def adapter(name: str, mask: BlockMask | None = None, **options: Any) -> Attention:
    kernel = next(spec for spec in veomni_kernels() if spec.name == name).load()
    module = AttentionModule(Q_HEADS // K_HEADS)
    return lambda q, k, v: kernel(module, *(each.transpose(1, 2) for each in (q, k, v)), mask, **options)[0]


def causal_blocks() -> BlockMask:
    """As transformers makes it, once for all layers."""
    return create_block_mask(lambda batch, head, q, k: q >= k, None, None, LENGTH, LENGTH, device="cuda")


def library(name: str, **options: Any) -> Attention:
    functions = import_module(LIBRARIES[name][1])

    def output(result: Tensor | tuple[Tensor, ...]) -> Tensor:
        return result if isinstance(result, Tensor) else result[0]

    if not options:
        return lambda q, k, v: output(functions.flash_attn_func(q, k, v, causal=True))
    lengths = {
        "cu_seqlens_q": options["cu_seq_lens_q"],
        "cu_seqlens_k": options["cu_seq_lens_k"],
        "max_seqlen_q": options["max_length_q"],
        "max_seqlen_k": options["max_length_k"],
    }
    packed = functions.flash_attn_varlen_func
    return lambda *heads: output(packed(*(each.squeeze(0) for each in heads), causal=True, **lengths)).unsqueeze(0)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    heads = (each.transpose(1, 2) for each in (q, k, v))
    return F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True).transpose(1, 2)


def inputs(batch: int, length: int, width: int) -> list[Tensor]:
    options = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    return [torch.randn(batch, length, heads, width, **options) for heads in (Q_HEADS, K_HEADS, K_HEADS)]


def check(name: str) -> None:
    """Hold a kernel against the contract's reference in float64 on short sequences, full and packed, with gradients."""
    bounds = torch.tensor([0, 100, 101, 512], dtype=torch.int32, device="cuda")
    for options in ({}, {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}):
        given = inputs(1, 512, 128)
        exact = [each.detach().double().requires_grad_() for each in given]
        heads = (each.transpose(1, 2) for each in exact)
        wanted, _ = standard(AttentionModule(Q_HEADS // K_HEADS), *heads, None, **options)
        found, upstream = adapter(name, **options)(*given), torch.randn_like(wanted)
        pairs = [(found.detach(), wanted.detach())]
        gradients = torch.autograd.grad(found, given, upstream.to(found.dtype))
        pairs += zip(gradients, torch.autograd.grad(wanted, exact, upstream), strict=True)
        errors = [relative_error(mine, theirs) for mine, theirs in pairs]
        print(f"{name}: result and gradients off by {', '.join(f'{error:.1e}' for error in errors)} of float64")
        if not max(errors) < 2e-2:
            raise SystemExit("wrong")


def contenders(kernels: list[str], **packing: Any) -> Iterator[tuple[str, Attention, str | None]]:
    """Each by its name, with the library that it is an adapter of."""
    for name in kernels:
        if name in LIBRARIES:
            yield f"{LIBRARIES[name][0]} itself", library(name, **packing), None
        yield name, adapter(name, **packing), LIBRARIES[name][0] if name in LIBRARIES else None
    if not packing:
        yield "sdpa", sdpa, None
    if not packing and "flex_attention" in kernels:
        yield "flex_attention, its mask given", adapter("flex_attention", causal_blocks()), None


def measure(attention: Attention, given: list[Tensor]) -> dict[str, Any]:
    upstream = torch.randn_like(given[0])
    both = training_step(lambda: attention(*given), lambda output: output.backward(upstream), given)
    peak = peak_mib_of_step(both, given)
    return {"both": asdict(timing(both)), "peak MiB": peak}


def figures(kernels: list[str]) -> Iterator[dict[str, Any]]:
    """Full sequences of each width of heads, then packed ones."""
    bounds = torch.tensor([0, *torch.tensor(PACKED).cumsum(0)], dtype=torch.int32, device="cuda")
    longest = max(PACKED)
    packing = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}
    cases = [
        (f"B={BATCH} S={LENGTH}, heads of {width}", (BATCH, LENGTH, width), [LENGTH] * BATCH, {}) for width in WIDTHS
    ]
    packed = f"{len(PACKED)} packed sequences, T={sum(PACKED)}, heads of {PACKED_WIDTH}"
    cases.append((packed, (1, sum(PACKED), PACKED_WIDTH), PACKED, packing))
    for what, shape, lengths, options in cases:
        given, flops = inputs(*shape), causal_flops(lengths, Q_HEADS, shape[-1])
        for name, attention, of_library in contenders(kernels, **options):
            found = measure(attention, given)
            tflops = flops / found["both"]["median"] / 1e9
            print(f"{what} {name}: {found}, {tflops:.0f} TFLOP/s", flush=True)
            yield {"input": what, "name": name, "library": of_library, **found, "TFLOP/s": tflops}


def rows(found: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    times = {(figure["input"], figure["name"]): figure["both"]["median"] for figure in found}
    for figure in found:
        both = figure["both"]
        own = times.get((figure["input"], f"{figure['library']} itself"))
        yield (
            figure["input"],
            figure["name"],
            f"{both['median']:.3f} ({both['low']:.3f} to {both['high']:.3f})",
            f"{figure['TFLOP/s']:.0f}",
            "" if own is None else f"{both['median'] / own:.3f}",
            f"{figure['peak MiB']:.0f}",
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernels", nargs="+", default=[*LIBRARIES, "flex_attention"])
    parser.add_argument("--name", help="the result file to write; none without it")
    options = parser.parse_args()
    torch.manual_seed(0)
    for kernel in options.kernels:
        check(kernel)
    found = list(figures(options.kernels))
    ceiling = product_tflop_per_second()
    if not options.name:
        return
    title = f"Causal attention, {Q_HEADS}/{K_HEADS} heads, bf16"
    data = {"machine": machine(), "matmul TFLOP/s": ceiling, "figures": found}
    write_results(options.name, title, data, COLUMNS, rows(found), script=__file__)


if __name__ == "__main__":
    main()
