"""The Triton rotary embedding on one GPU against transformers' own, compiled and not, and Liger's, in place and not."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root, for `benchmarks`

from benchmarks.shared import memory_bound
from benchmarks.shared.accuracy import hold
from veomni_core.ops.rotary_pos_emb import CONTRACTS
from veomni_triton_moe import rotary_pos_emb

BATCH, POSITIONS, Q_HEADS, K_HEADS, WIDTH = 4, 4096, 32, 8, 128
TITLE = "Rotary position embedding, bf16"
SHAPE = f"B={BATCH} S={POSITIONS} heads {Q_HEADS}/{K_HEADS} D={WIDTH}"


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
        hold(name, mine, theirs, contract.values["bfloat16"].norm)


def candidates(arguments: list[Tensor], transposed: bool) -> Iterator[tuple[Any, Callable[[], Any]]]:
    for positions, num_warps in product((1, 2, 4), (1, 2, 4, 8)):
        launch = rotary_pos_emb.Launch(positions, num_warps)
        yield launch, lambda launch=launch: rotary_pos_emb.rotate(*arguments, 1, transposed, launch)


def main() -> None:
    options = memory_bound.options(__doc__)
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
        for name in ("forward", "backward"):
            memory_bound.fastest(name, candidates(detached, name == "backward"))
        return
    figures = [
        memory_bound.measure(
            name,
            SHAPE,
            lambda function=function: function(*arguments),
            lambda results: torch.autograd.backward(results, upstream),
            leaves,
            traffic=4 * (q.nbytes + k.nbytes),
        )
        for name, function in memory_bound.selected(functions(), options.only).items()
    ]
    memory_bound.write(options.name, TITLE, figures, __file__)


if __name__ == "__main__":
    main()
