"""The FlashAttention adapters on one GPU against the library's own call and torch's attention, causal, in bf16."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from attention_flops import causal_flops
from gpu import peak_mib, product_tflop_per_second, relative_error, timing
from results import machine, write_results
from veomni_core.ops.attention import AttentionModule, standard
from veomni_flash_attn.plugin import veomni_kernels

BATCH, LENGTH, Q_HEADS, K_HEADS, WIDTH = 2, 8192, 32, 8, 128
PACKED = (1, 4096, 37, 6000, 2202, 4048)  # 16384 tokens in six sequences
COLUMNS = ("input", "kernel", "forward+backward ms (20 to 80 %)", "TFLOP/s", "of the library's time", "peak MiB")

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def adapter(name: str, mask: BlockMask | None = None, **options: Any) -> Attention:
    kernel = next(spec for spec in veomni_kernels() if spec.name == name).load()
    module = AttentionModule(Q_HEADS // K_HEADS)
    return lambda q, k, v: kernel(module, *(each.transpose(1, 2) for each in (q, k, v)), mask, **options)[0]


def causal_blocks() -> BlockMask:
    """As transformers makes it, once for all layers."""
    return create_block_mask(lambda batch, head, q, k: q >= k, None, None, LENGTH, LENGTH, device="cuda")


def library(**options: Any) -> Attention:
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    if not options:
        return lambda q, k, v: flash_attn_func(q, k, v, causal=True)[0]
    lengths = {
        "cu_seqlens_q": options["cu_seq_lens_q"],
        "cu_seqlens_k": options["cu_seq_lens_k"],
        "max_seqlen_q": options["max_length_q"],
        "max_seqlen_k": options["max_length_k"],
    }
    return lambda q, k, v: flash_attn_varlen_func(q[0], k[0], v[0], causal=True, **lengths)[0].unsqueeze(0)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    heads = (each.transpose(1, 2) for each in (q, k, v))
    return F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True).transpose(1, 2)


def inputs(batch: int, length: int) -> list[Tensor]:
    options = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    return [torch.randn(batch, length, heads, WIDTH, **options) for heads in (Q_HEADS, K_HEADS, K_HEADS)]


def check(name: str) -> None:
    """Hold a kernel against the contract's reference in float64 on short sequences, full and packed, with gradients."""
    bounds = torch.tensor([0, 100, 101, 512], dtype=torch.int32, device="cuda")
    for options in ({}, {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}):
        given = inputs(1, 512)
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


def measure(what: str, name: str, attention: Attention, given: list[Tensor], flops: float) -> dict[str, Any]:
    upstream = torch.randn_like(given[0])

    def both() -> None:
        for each in given:
            each.grad = None
        attention(*given).backward(upstream)

    both()
    for each in given:
        each.grad = None
    peak = peak_mib(both)
    time = timing(both)
    tflops = flops / time.median / 1e9
    print(f"{what} {name}: {time}, {tflops:.0f} TFLOP/s, {peak:.0f} MiB", flush=True)
    return {"input": what, "name": name, "both": asdict(time), "TFLOP/s": tflops, "peak MiB": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", help="the page in docs/benchmarks to write; none without it")
    name = parser.parse_args().name
    torch.manual_seed(0)
    bounds = torch.tensor([0, *torch.tensor(PACKED).cumsum(0)], dtype=torch.int32, device="cuda")
    longest = max(PACKED)
    packing = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}
    for kernel in ("flash_attention_4", "flex_attention"):
        check(kernel)
    dense, packed = f"B={BATCH} S={LENGTH}", f"{len(PACKED)} packed sequences, T={sum(PACKED)}"
    contenders = {
        dense: {
            "flash-attn-4 itself": library(),
            "flash_attention_4": adapter("flash_attention_4"),
            "sdpa": sdpa,
            "flex_attention": adapter("flex_attention"),
            "flex_attention, its mask given": adapter("flex_attention", causal_blocks()),
        },
        packed: {
            "flash-attn-4 itself": library(**packing),
            "flash_attention_4": adapter("flash_attention_4", **packing),
            "flex_attention": adapter("flex_attention", **packing),
        },
    }
    figures = []
    for what, attentions in contenders.items():
        given = inputs(BATCH, LENGTH) if what == dense else inputs(1, sum(PACKED))
        lengths = [LENGTH] * BATCH if what == dense else PACKED
        flops = causal_flops(lengths, Q_HEADS, WIDTH)
        figures += [measure(what, each, attention, given, flops) for each, attention in attentions.items()]
    ceiling = product_tflop_per_second()
    if not name:
        return
    own = {figure["input"]: figure["both"]["median"] for figure in figures if figure["name"] == "flash-attn-4 itself"}
    rows = [
        (
            figure["input"],
            figure["name"],
            f"{figure['both']['median']:.3f} ({figure['both']['low']:.3f} to {figure['both']['high']:.3f})",
            f"{figure['TFLOP/s']:.0f}",
            f"{figure['both']['median'] / own[figure['input']]:.3f}",
            f"{figure['peak MiB']:.0f}",
        )
        for figure in figures
    ]
    title = f"Causal attention, {Q_HEADS}/{K_HEADS} heads of {WIDTH}, bf16"
    note = f"A matrix product of 8192 in the same run: {ceiling:.0f} TFLOP/s. TFLOP/s count what a causal mask keeps. "
    note += "Peak memory is beyond the inputs; the gradients are part of it."
    data = {"machine": machine(), "matmul TFLOP/s": ceiling, "figures": figures}
    write_results(name, title, data, COLUMNS, rows, note, script="flash_attention.py")


if __name__ == "__main__":
    main()
