"""veomni-triton's gated activation against its peers on a GPU, in bf16: forward and backward.

python benchmarks/swiglu_mlp/triton_swiglu_mlp.py --name triton_swiglu_mlp_h200
python benchmarks/swiglu_mlp/triton_swiglu_mlp.py --tune
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root, for `benchmarks`

from benchmarks.shared import memory_bound
from benchmarks.shared.accuracy import hold
from veomni_core.ops.swiglu_mlp import CONTRACTS
from veomni_torch import swiglu_mlp as plain
from veomni_triton import swiglu_mlp

SHAPES = ((16384, 6144), (16384, 8192))
TITLE = "Gated activation (SiLU), bf16"
Function = Callable[[Tensor, Tensor], Any]


def functions() -> dict[str, Function]:
    """Every contender, by name; Liger's own overwrites gate and up in backward."""

    def eager(gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up

    found: dict[str, Function] = {
        "veomni triton": swiglu_mlp.standard,
        "transformers": eager,
        "transformers, compiled": torch.compile(eager),
        "veomni-torch": plain.standard,
    }
    try:
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        from veomni_liger import swiglu_mlp as liger
    except ImportError as error:
        print(f"without Liger: {error}")
    else:
        found["veomni-liger"] = liger.standard
        found["Liger, in place"] = LigerSiLUMulFunction.apply
    return found


def check(gate: Tensor, up: Tensor, upstream: Tensor) -> None:
    """Hold our result and gradients against the contract's reference in float64."""
    contract = CONTRACTS["standard"]
    exact = [tensor.detach().double().requires_grad_() for tensor in (gate, up)]
    found, wanted = swiglu_mlp.standard(gate, up), contract.reference(*exact)
    dfound = torch.autograd.grad(found, (gate, up), upstream)
    dwanted = torch.autograd.grad(wanted, exact, upstream.double())
    for name, mine, theirs in zip(("result", "dgate", "dup"), (found, *dfound), (wanted, *dwanted), strict=True):
        hold(name, mine, theirs, contract.values["bfloat16"].norm)


def tune(gate: Tensor, up: Tensor, upstream: Tensor) -> None:
    """Print the fastest stretches of columns and numbers of warps."""
    with torch.no_grad():
        for name, call in (
            ("forward", lambda *launch: swiglu_mlp.activated(gate, up, False, *launch)),
            ("backward", lambda *launch: swiglu_mlp.gradients(upstream, gate, up, False, *launch)),
        ):
            candidates = (
                (launch, lambda launch=launch, call=call: call(*launch))
                for launch in product((512, 1024, 2048, 4096, 8192), (2, 4, 8))
            )
            memory_bound.fastest(f"{tuple(gate.shape)} {name}", candidates)


def drawn(size: tuple[int, int]) -> list[Tensor]:
    """The gate, up and the incoming gradient."""
    torch.manual_seed(0)
    *leaves, upstream = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    return [*(leaf.requires_grad_() for leaf in leaves), upstream]


def compare(size: tuple[int, int], only: Collection[str] | None) -> Iterator[dict[str, Any]]:
    *leaves, upstream = drawn(size)
    check(*leaves, upstream)
    for name, function in memory_bound.selected(functions(), only).items():
        yield memory_bound.measure(
            name,
            "{}x{}".format(*size),
            lambda function=function: function(*leaves),
            lambda result: result.backward(upstream),
            leaves,
            traffic=8 * upstream.nbytes,
        )


OURS = ("veomni triton", "veomni-torch")
BENCHMARK = memory_bound.benchmark({"{}x{}".format(*size): size for size in SHAPES}, compare, OURS)


def main() -> None:
    options = memory_bound.options(__doc__)
    if options.tune:
        for size in SHAPES:
            tensors = drawn(size)
            check(*tensors)
            tune(*tensors)
        return
    figures = [found for size in SHAPES for found in compare(size, options.only)]
    memory_bound.write(options.name, TITLE, figures, __file__)


if __name__ == "__main__":
    main()
