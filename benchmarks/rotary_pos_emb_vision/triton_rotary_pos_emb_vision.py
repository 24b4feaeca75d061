"""The Triton rotation of vision towers on one GPU against transformers' own code, compiled and not.

    python benchmarks/rotary_pos_emb_vision/triton_rotary_pos_emb_vision.py [--name triton_rotary_pos_emb_vision_h200]

In bf16 with angles in float32, at the shapes of several towers: the patches of one image of 1792 x 1792 pixels, and
queries and keys as views of one projection. Our results and gradients are compared with float64 first. Where the
installed transformers has no such code, the contract's formula stands in for it. ``--tune`` times our kernel
alone over launches instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root, for `benchmarks`

from benchmarks.shared import memory_bound
from benchmarks.shared.accuracy import hold
from veomni_ops.rotary_pos_emb_vision import CONTRACTS
from veomni_triton import rotary_pos_emb_vision
from veomni_triton.rotary_pos_emb_vision.launch import LAUNCH, Launch, rotate_patches

TITLE = "Rotary position embedding of vision towers, bf16"
PATCHES = 16384
Rotation = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Case:
    """One call of a tower: the folder of transformers that it is in, the variant, and the heads.

    Attributes:
        family: The folder of transformers in which the tower's function is.
        variant: The contract's variant that it is.
        heads: Heads of queries, and as many of keys.
        width: Dimensions of a head.
        rotated: How many of them it rotates.
    """

    family: str
    variant: str
    heads: int
    width: int
    rotated: int

    def __str__(self) -> str:
        return f"{self.family} ({self.variant}): S={PATCHES} heads {self.heads} D={self.width}"

    def model_function(self) -> Rotation | None:
        """transformers' own code; ``None`` where the installed one has none that takes queries as they are drawn."""
        try:
            module = import_module(f"transformers.models.{self.family}.modeling_{self.family}")
            x, angles = torch.zeros(2, self.heads, self.width), torch.zeros(2, self.rotated)
            module.apply_rotary_pos_emb_vision(x, x, angles, angles)
        except (ImportError, RuntimeError) as error:
            print(f"{self}: {error}")
            return None
        function: Rotation = module.apply_rotary_pos_emb_vision
        return function

    def drawn(self) -> tuple[list[Tensor], list[Tensor]]:
        """Queries and keys ``[S, H, D]``, leaves with gaps between their patches; cosines and sines ``[S, R]``."""
        q, k, _ = torch.randn(PATCHES, 3, self.heads, self.width, device="cuda").bfloat16().unbind(1)
        angles = torch.randn(PATCHES, self.rotated, device="cuda")
        return [q.detach().requires_grad_(), k.detach().requires_grad_()], [angles.cos(), angles.sin()]


CASES = (
    Case("qwen2_vl", "full", 16, 80, 80),
    Case("qwen3_vl", "full", 16, 72, 72),
    Case("minimax_m3_vl", "partial", 16, 80, 78),
    Case("inkling2", "pairwise", 16, 64, 64),
)


def functions(case: Case) -> dict[str, Rotation]:
    who, function = "transformers", case.model_function()
    if function is None:
        who, function = "the formula", CONTRACTS[case.variant].reference
    return {
        "triton": getattr(rotary_pos_emb_vision, case.variant),
        who: function,
        f"{who}, compiled": torch.compile(function, dynamic=False),
    }


def check(case: Case, heads: list[Tensor], angles: list[Tensor], upstream: list[Tensor]) -> None:
    """Hold our results and gradients against the contract's reference in float64."""
    contract = CONTRACTS[case.variant]
    exact = [each.detach().double().requires_grad_() for each in heads]
    found = getattr(rotary_pos_emb_vision, case.variant)(*heads, *angles)
    wanted = contract.reference(*exact, *(each.double() for each in angles))
    dfound = torch.autograd.grad(found, heads, upstream)
    dwanted = torch.autograd.grad(wanted, exact, [each.double() for each in upstream])
    for name, mine, theirs in zip(("q", "k", "dq", "dk"), (*found, *dfound), (*wanted, *dwanted), strict=True):
        hold(f"{case}: {name}", mine, theirs, contract.values["bfloat16"].norm)


def candidates(case: Case) -> Iterator[tuple[Any, Callable[[], Any]]]:
    """Launches in which a thread has 2 to 16 pairs of ``q``, and the one that is taken, first."""
    heads, angles = case.drawn()
    q, k = (each.detach() for each in heads)
    launches = [Launch(*sizes) for sizes in product((128, 256, 512, 1024, 2048), (1, 2, 4, 8))]
    fitting = [each for each in launches if 2 <= each.pairs // (32 * each.num_warps) <= 16]
    for launch in dict.fromkeys((LAUNCH, *fitting)):
        yield launch, lambda launch=launch: rotate_patches(q, k, *angles, case.variant == "pairwise", False, launch)


def compare(case: Case, only: Collection[str] | None) -> Iterator[dict[str, Any]]:
    torch.manual_seed(0)
    heads, angles = case.drawn()
    upstream = [torch.randn_like(each, memory_format=torch.contiguous_format) for each in heads]
    check(case, heads, angles, upstream)
    for name, function in memory_bound.selected(functions(case), only).items():
        yield memory_bound.measure(
            name,
            str(case),
            lambda function=function: function(*heads, *angles),
            lambda results: torch.autograd.grad(results, heads, upstream),
            heads,
            traffic=4 * sum(each.nbytes for each in heads),
        )


BENCHMARK = memory_bound.benchmark({str(case): case for case in CASES}, compare, ours=("triton",))


def main() -> None:
    options = memory_bound.options(__doc__)
    if options.tune:
        for case in CASES:
            memory_bound.fastest(str(case), candidates(case), keep=8)
        return
    figures = [found for case in CASES for found in compare(case, options.only)]
    memory_bound.write(options.name, TITLE, figures, __file__)


if __name__ == "__main__":
    main()
