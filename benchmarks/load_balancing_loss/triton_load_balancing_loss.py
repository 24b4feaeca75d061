"""The Triton load-balancing loss on one GPU against transformers' own, compiled and not, and veomni-torch's.

Memory is beyond the logits; over both passes the gradients, as large as the logits, are part of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root, for `benchmarks`

import veomni_torch.load_balancing_loss
from benchmarks.shared import memory_bound
from benchmarks.shared.accuracy import hold
from veomni_ops.load_balancing_loss import CONTRACTS
from veomni_triton_moe import load_balancing_loss

LAYERS, TOKENS, EXPERTS, TOP_K = 48, 16384, 128, 8
TITLE = "Load-balancing loss, bf16"
SHAPE = f"L={LAYERS} T={TOKENS} E={EXPERTS} K={TOP_K}"
FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "triton": load_balancing_loss.standard,
    "veomni-torch": veomni_torch.load_balancing_loss.standard,
    "transformers": load_balancing_loss_func,
    "transformers, compiled": torch.compile(load_balancing_loss_func, dynamic=False),
}


def layer_logits() -> Tensor:
    """One layer's logits: of each token distinct levels, since a tie may be broken either way, and experts unlike."""
    levels = torch.linspace(-3.0, 3.0, EXPERTS, device="cuda").bfloat16()
    liking = torch.randn(TOKENS, EXPERTS, device="cuda") + torch.linspace(-1.0, 1.0, EXPERTS, device="cuda")
    return levels[liking.argsort(-1).argsort(-1)].requires_grad_()


def check(logits: tuple[Tensor, ...]) -> None:
    """Hold our loss and gradients against the contract's reference in float64."""
    contract = CONTRACTS["standard"]
    exact = tuple(each.detach().double().requires_grad_() for each in logits)
    found = load_balancing_loss.standard(logits, EXPERTS, TOP_K)
    wanted = contract.reference(exact, EXPERTS, TOP_K)
    gradients = (torch.stack(torch.autograd.grad(*pair)) for pair in ((found, logits), (wanted, exact)))
    hold("loss", found, wanted, contract.values["bfloat16"].norm)
    hold("gradients", *gradients, contract.gradients["bfloat16"].norm)


def sums_candidates(logits: list[Tensor]) -> Iterator[tuple[Any, Callable[[], Any]]]:
    for num_warps, stages, registers in product((4, 8), (1, 2), (None, 168, 128)):
        for programs in (2, 3, 4, 6, 8, 16):
            launch = load_balancing_loss.sums_launch(logits, programs, num_warps)
            launch = replace(launch, stages=stages, registers=registers)
            yield launch, lambda launch=launch: load_balancing_loss.loss_and_slope(logits, TOP_K, None, launch)


def gradients_candidates(logits: list[Tensor]) -> Iterator[tuple[Any, Callable[[], Any]]]:
    loss, slope = torch.ones((), device="cuda"), torch.ones(EXPERTS, device="cuda")
    for num_warps, tokens in product((2, 4, 8), (8, 16, 32, 64)):
        launch = load_balancing_loss.Launch(tokens, -(-TOKENS // tokens), num_warps)
        yield launch, lambda launch=launch: load_balancing_loss.gradients(loss, slope, logits, None, launch)


def drawn(layers: int) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return tuple(layer_logits() for _ in range(layers))


def compare(layers: int, only: Collection[str] | None) -> Iterator[dict[str, Any]]:
    logits = drawn(layers)
    check(logits)
    for name, function in memory_bound.selected(FUNCTIONS, only).items():
        yield memory_bound.measure(
            name,
            SHAPE,
            lambda function=function: function(logits, EXPERTS, TOP_K),
            lambda loss: loss.backward(),
            logits,
            traffic=3 * sum(each.nbytes for each in logits),
        )


BENCHMARK = memory_bound.benchmark({SHAPE: LAYERS}, compare, ours=("triton", "veomni-torch"))


def main() -> None:
    options = memory_bound.options(__doc__)
    if options.tune:
        logits = drawn(LAYERS)
        check(logits)
        detached = [each.detach() for each in logits]
        memory_bound.fastest("sums and loss", sums_candidates(detached))
        memory_bound.fastest("gradients", gradients_candidates(detached))
        return
    memory_bound.write(options.name, TITLE, list(compare(LAYERS, options.only)), __file__)


if __name__ == "__main__":
    main()
