"""The Triton rotary embedding on one GPU against transformers' own, compiled and not, Liger's and QuACK's.

In bf16, at the shapes and in the memory layouts of several families. Our results and gradients are compared with
float64 first. Liger's kernel is for one of the variants, and QuACK's for those that write a pair where they read it.
``--tune`` times our kernel alone over launches instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root, for `benchmarks`

from benchmarks.rotary_pos_emb.cases import CASES, Case
from benchmarks.shared import memory_bound
from benchmarks.shared.accuracy import hold
from veomni_ops.rotary_pos_emb import CONTRACTS
from veomni_triton import rotary_pos_emb
from veomni_triton.rotary_pos_emb.form import Form
from veomni_triton.rotary_pos_emb.launch import Launch, rotate, rotate_launch

TITLE = "Rotary position embedding, bf16"
FORMS = {
    "full": Form(),
    "partial": Form(),
    "interleaved": Form(reads_neighbours=True, writes_neighbours=True),
    "deinterleaved": Form(reads_neighbours=True),
}


def functions(case: Case) -> dict[str, Callable[..., tuple[Tensor, Tensor]]]:
    model_function = case.model_function()
    found: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
        "triton": getattr(rotary_pos_emb, case.variant),
        "transformers": model_function,
        "transformers, compiled": torch.compile(model_function, dynamic=False),
    }
    if case.variant == "full":
        try:
            liger = import_module("liger_kernel.ops.rope").LigerRopeFunction
        except ImportError as error:
            print(f"without Liger: {error}")
        else:
            found["Liger"] = lambda q, k, cos, sin: liger.apply(q.clone(), k.clone(), cos, sin)
            found["Liger, in place"] = liger.apply
    try:
        quack = import_module("veomni_quack.rotary_pos_emb")
    except ImportError as error:
        print(f"without QuACK: {error}")
    else:
        if hasattr(quack, case.variant):
            found["QuACK, by veomni-quack"] = getattr(quack, case.variant)
    return found


def check(case: Case, arguments: list[Tensor], upstream: list[Tensor]) -> None:
    """Hold our results and gradients against the contract's reference in float64."""
    contract = CONTRACTS[case.variant]
    exact = [each.detach().double().requires_grad_(each.requires_grad) for each in arguments]
    found, wanted = getattr(rotary_pos_emb, case.variant)(*arguments), contract.reference(*exact)
    dfound = torch.autograd.grad(found, arguments[:2], upstream)
    dwanted = torch.autograd.grad(wanted, exact[:2], [each.double() for each in upstream])
    for name, mine, theirs in zip(("q", "k", "dq", "dk"), (*found, *dfound), (*wanted, *dwanted), strict=True):
        hold(f"{case}: {name}", mine, theirs, contract.values["bfloat16"].norm)


def candidates(q: Tensor, k: Tensor, angles: list[Tensor], form: Form) -> Iterator[tuple[Any, Callable[[], Any]]]:
    """Launches in which a thread has 16 to 128 elements of ``q``, and the one that is taken, first."""
    per_position = triton.next_power_of_2(q.shape[1]) * triton.next_power_of_2(q.shape[3])
    launches = [Launch(positions, warps) for positions, warps in product((1, 2, 4, 8, 16), (1, 2, 4, 8, 16))]
    fitting = [each for each in launches if 16 <= each.positions * per_position // (32 * each.num_warps) <= 128]
    for launch in dict.fromkeys((rotate_launch(*q.shape[1:]), *fitting)):
        yield launch, lambda launch=launch: rotate(q, k, *angles, 1, form, launch)


def tune(case: Case) -> None:
    """Forward on what the model gives, and backward on gradients of the same layout."""
    torch.manual_seed(0)
    q, k = case.drawn_heads()
    angles = [each[..., : case.rotated // 2] for each in case.drawn_angles()]
    form = FORMS[case.variant]
    print(f"{case}: taken is {rotate_launch(*q.shape[1:])}")
    for name, each in (("forward", form), ("backward", form.transposed())):
        memory_bound.fastest(f"{case} {name}", candidates(q, k, angles, each), keep=20)


def compare(case: Case, only: Collection[str] | None) -> Iterator[dict[str, Any]]:
    torch.manual_seed(0)
    # Leaves with the model's strides, and gradients asked for by name: none is copied into another layout.
    leaves = [each.detach().requires_grad_() for each in case.drawn_heads()]
    arguments = [*leaves, *case.drawn_angles()]
    upstream = list(case.drawn_heads())
    check(case, arguments, upstream)
    for name, function in memory_bound.selected(functions(case), only).items():
        yield memory_bound.measure(
            name,
            str(case),
            lambda function=function: function(*arguments),
            lambda results: torch.autograd.grad(results, leaves, upstream),
            leaves,
            traffic=4 * sum(each.nbytes for each in leaves),
        )


BENCHMARK = memory_bound.benchmark({str(case): case for case in CASES}, compare, ours=("triton",))


def main() -> None:
    options = memory_bound.options(__doc__)
    if options.tune:
        for case in CASES:
            tune(case)
        return
    figures = [found for case in CASES for found in compare(case, options.only)]
    memory_bound.write(options.name, TITLE, figures, __file__)


if __name__ == "__main__":
    main()
