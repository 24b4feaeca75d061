"""veomni-triton's gated activations against their peers on a GPU, in bf16: forward and backward.

python benchmarks/swiglu_mlp/triton_swiglu_mlp.py --name triton_swiglu_mlp_h200
python benchmarks/swiglu_mlp/triton_swiglu_mlp.py --tune
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root, for `benchmarks`

from benchmarks.shared import memory_bound
from benchmarks.shared.accuracy import hold
from veomni_ops.swiglu_mlp import CONTRACTS
from veomni_torch import swiglu_mlp as plain
from veomni_triton import swiglu_mlp

Case = tuple[str, int, int]  # the variant, rows and columns
CASES: dict[str, Case] = {
    "16384x6144": ("standard", 16384, 6144),
    "16384x8192": ("standard", 16384, 8192),
    "GELU, 16384x6144": ("gelu", 16384, 6144),
    "GELU by tanh, 16384x6144": ("gelu_tanh", 16384, 6144),
}
ACTIVATIONS = {"standard": F.silu, "gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh")}
# Liger's functions, which overwrite gate and up in backward; it has no exact GELU.
LIGER = {"standard": ("swiglu", "LigerSiLUMulFunction"), "gelu_tanh": ("geglu", "LigerGELUMulFunction")}
TITLE = "Gated activation (SiLU, and GELU where named), bf16"
Function = Callable[[Tensor, Tensor], Any]


def functions(variant: str) -> dict[str, Function]:
    """Every contender, by name."""

    def eager(gate: Tensor, up: Tensor) -> Tensor:
        return ACTIVATIONS[variant](gate) * up

    found: dict[str, Function] = {
        "veomni triton": getattr(swiglu_mlp, variant),
        "transformers": eager,
        "transformers, compiled": torch.compile(eager),
        "veomni-torch": getattr(plain, variant),
    }
    if variant in LIGER:
        module, name = LIGER[variant]
        try:
            liger = import_module("veomni_liger.swiglu_mlp")
            own = getattr(import_module(f"liger_kernel.ops.{module}"), name)
        except ImportError as error:
            print(f"without Liger: {error}")
        else:
            found |= {"veomni-liger": getattr(liger, variant), "Liger, in place": own.apply}
    return found


def check(variant: str, gate: Tensor, up: Tensor, upstream: Tensor) -> None:
    """Hold our result and gradients against the contract's reference in float64."""
    contract = CONTRACTS[variant]
    exact = [tensor.detach().double().requires_grad_() for tensor in (gate, up)]
    found, wanted = getattr(swiglu_mlp, variant)(gate, up), contract.reference(*exact)
    dfound = torch.autograd.grad(found, (gate, up), upstream)
    dwanted = torch.autograd.grad(wanted, exact, upstream.double())
    for name, mine, theirs in zip(("result", "dgate", "dup"), (found, *dfound), (wanted, *dwanted), strict=True):
        hold(name, mine, theirs, contract.values["bfloat16"].norm)


def tune(name: str, variant: str, gate: Tensor, up: Tensor, upstream: Tensor) -> None:
    """Print the fastest stretches of columns and numbers of warps."""
    activation = "silu" if variant == "standard" else variant
    with torch.no_grad():
        for each, call in (
            ("forward", lambda launch: swiglu_mlp.activated(gate, up, activation, launch)),
            ("backward", lambda launch: swiglu_mlp.gradients(upstream, gate, up, activation, launch)),
        ):
            launches = (swiglu_mlp.Launch(*sizes) for sizes in product((512, 1024, 2048, 4096, 8192), (2, 4, 8)))
            candidates = ((launch, lambda launch=launch, call=call: call(launch)) for launch in launches)
            memory_bound.fastest(f"{name} {each}", candidates)


def drawn(*size: int) -> list[Tensor]:
    """The gate, up and the incoming gradient."""
    torch.manual_seed(0)
    *leaves, upstream = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    return [*(leaf.requires_grad_() for leaf in leaves), upstream]


def compare(case: Case, only: Collection[str] | None) -> Iterator[dict[str, Any]]:
    variant, *size = case
    *leaves, upstream = drawn(*size)
    check(variant, *leaves, upstream)
    (shape,) = (name for name, each in CASES.items() if each == case)
    for name, function in memory_bound.selected(functions(variant), only).items():
        yield memory_bound.measure(
            name,
            shape,
            lambda function=function: function(*leaves),
            lambda result: result.backward(upstream),
            leaves,
            traffic=8 * upstream.nbytes,
        )


OURS = ("veomni triton", "veomni-torch")
BENCHMARK = memory_bound.benchmark(CASES, compare, OURS)


def main() -> None:
    options = memory_bound.options(__doc__)
    if options.tune:
        for name, (variant, *size) in CASES.items():
            tensors = drawn(*size)
            check(variant, *tensors)
            tune(name, variant, *tensors)
        return
    figures = [found for case in CASES.values() for found in compare(case, options.only)]
    memory_bound.write(options.name, TITLE, figures, __file__)


if __name__ == "__main__":
    main()
