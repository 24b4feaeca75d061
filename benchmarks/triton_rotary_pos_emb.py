"""The Triton rotary embedding on one GPU against transformers' own, compiled and not, and Liger's, in place and not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import gpu_timing
from veomni_core.ops.rotary_pos_emb import CONTRACTS
from veomni_triton_moe import rotary_pos_emb

BATCH, POSITIONS, Q_HEADS, K_HEADS, WIDTH = 4, 4096, 32, 8, 128
SHAPE = f"B={BATCH} S={POSITIONS} heads {Q_HEADS}/{K_HEADS} D={WIDTH}, bfloat16"


def functions() -> dict[str, Callable[..., tuple[Tensor, Tensor]]]:
    found: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
        "triton": rotary_pos_emb.full,
        "transformers": apply_rotary_pos_emb,
        "transformers, compiled": torch.compile(apply_rotary_pos_emb, dynamic=False),
    }
    try:
        from liger_kernel.ops.rope import LigerRopeFunction
    except ImportError as error:
        print(f"without Liger: {error}")
    else:
        found["Liger"] = lambda q, k, cos, sin: LigerRopeFunction.apply(q.clone(), k.clone(), cos, sin)
        found["Liger, in place"] = LigerRopeFunction.apply
    return found


def check(arguments: list[Tensor], upstream: list[Tensor]) -> None:
    """Hold our results and gradients against the contract's reference in float64."""
    contract = CONTRACTS["full"]
    exact = [each.detach().double().requires_grad_(each.requires_grad) for each in arguments]
    found, wanted = rotary_pos_emb.full(*arguments), contract.reference(*exact)
    dfound = torch.autograd.grad(found, arguments[:2], upstream)
    dwanted = torch.autograd.grad(wanted, exact[:2], [each.double() for each in upstream])
    for name, mine, theirs in zip(("q", "k", "dq", "dk"), (*found, *dfound), (*wanted, *dwanted), strict=True):
        gpu_timing.hold(name, mine, theirs, contract.values["bfloat16"].norm)


def candidates(arguments: list[Tensor], transposed: bool) -> Iterator[tuple[Any, Callable[[], Any]]]:
    for positions, num_warps in product((1, 2, 4), (1, 2, 4, 8)):
        launch = rotary_pos_emb.Launch(positions, num_warps)
        yield launch, lambda launch=launch: rotary_pos_emb.rotate(*arguments, 1, transposed, launch)


def main() -> None:
    options = gpu_timing.options(__doc__)
    torch.manual_seed(0)
    leaves = [
        torch.randn(BATCH, POSITIONS, heads, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for heads in (Q_HEADS, K_HEADS)
    ]
    q, k = (each.transpose(1, 2) for each in leaves)
    angles = torch.randn(BATCH, POSITIONS, WIDTH // 2, device="cuda").repeat(1, 1, 2)
    arguments = [q, k, angles.cos().bfloat16(), angles.sin().bfloat16()]
    upstream = [torch.randn_like(each) for each in (q, k)]
    check(arguments, upstream)
    if options.tune:
        detached = [each.detach() for each in arguments]
        figures = {
            name: gpu_timing.fastest(name, candidates(detached, name == "backward")) for name in ("forward", "backward")
        }
    else:
        ceiling = gpu_timing.copy_gb_per_second()
        floor = 4 * (q.nbytes + k.nbytes) / ceiling / 1e6
        print(f"{SHAPE}; a copy runs at {ceiling:.0f} GB/s, so both passes take at least {floor:.3f} ms")
        calls = {
            name: lambda function=function: function(*arguments)
            for name, function in functions().items()
            if not options.only or name in options.only
        }
        rows = gpu_timing.compare(calls, lambda results: torch.autograd.backward(results, upstream), leaves)
        figures = {"copy GB/s": ceiling, "floor of both ms": floor, "contenders": rows}
    gpu_timing.write(options.output, SHAPE, figures)


if __name__ == "__main__":
    main()
