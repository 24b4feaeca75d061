"""What a step would gain if a residual sum and the norm after it were one kernel instead of two.

    python benchmarks/whole_models/residual_sums.py [--name residual_sums_h200]

The one kernel is QuACK's norm with a residual: it gives the sum and the normalised sum, and its backward takes the
gradients of both. It is first timed alone beside PyTorch's sum with veomni-triton's norm, as CUDA graphs.

Then a bf16 model with ``preset: auto`` is timed beside two copies of it that call it. One copy does within its layers,
before the MLP. The other does between layers too: a layer hands on its MLP's output and the sum before it, and the next
layer's first norm adds the two. Steps are CUDA graphs of 4 x 4096 tokens, since Python's launches vary by more than is
looked for. The three take turns, one step each, and a ratio is the median of those of single turns.

QuACK rounds where the norm's variant ``cast_after`` does, and these models where ``standard`` does. So the losses agree
to some digits, and the time is what a kernel for ``standard`` could reach.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root, for `benchmarks`

from benchmarks.shared.accuracy import hold
from benchmarks.shared.gpu_kernels import launches
from benchmarks.shared.measuring import captured, event_milliseconds, timing, training_step, warm_up
from benchmarks.shared.results import machine, table, write_results
from benchmarks.whole_models.contenders import AS_A_GRAPH, build
from benchmarks.whole_models.image_inputs import inputs_of
from benchmarks.whole_models.train_step import step_of
from veomni_core import bind
from veomni_ops.rms_norm import CONTRACTS

MODELS = ("llama-1b", "qwen3-0.6b")
BATCH, ROWS, TURNS, EPS = "4x4096", 16384, 40, 1e-6
TWO, WITHIN, ACROSS = "two kernels", "one within layers", "one within and between layers"
COLUMNS = ("model", "sum and norm", "ms (20 to 80 %)", "of the time of two (20 to 80 %)", "kernels", "loss")
Both = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def quack(x: Tensor, residual: Tensor, weight: Tensor, eps: float = EPS) -> tuple[Tensor, Tensor]:
    """The normalised sum and the sum of ``x [..., H]`` and ``residual [..., H]``, by one kernel."""
    from quack.rmsnorm import rmsnorm

    normalised, total = rmsnorm(x, weight, residual=residual, eps=eps, prenorm=True)
    return normalised, total


def two_kernels(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The same by PyTorch's sum and veomni-triton's norm, with QuACK's rounding."""
    from veomni_triton.rms_norm import cast_after

    total = residual + x
    return cast_after(total, weight, EPS), total


def alone(call: Both, width: int) -> float:
    """Milliseconds of a forward and backward of ``[ROWS, width]``, after its results and gradients were checked."""
    torch.manual_seed(0)
    x, residual, *upstream = (torch.randn(ROWS, width, device="cuda").bfloat16() for _ in range(4))
    operands = (x, residual, torch.randn(width, device="cuda").bfloat16())
    check(call, operands, upstream)
    leaves = [operand.requires_grad_() for operand in operands]

    def backward(results: Sequence[Tensor]) -> None:
        torch.autograd.backward(list(results), upstream)

    replay = captured(training_step(lambda: call(*leaves), backward, leaves))
    assert replay is not None, f"{call.__name__} can't be captured"
    return timing(replay).median


def check(call: Both, operands: Sequence[Tensor], upstream: Sequence[Tensor]) -> None:
    """Hold the results and gradients of ``call`` against float64."""
    leaves = [operand.clone().requires_grad_() for operand in operands]
    exact = [operand.double().requires_grad_() for operand in operands]
    total = exact[0] + exact[1]
    wanted = (CONTRACTS["cast_after"].reference(total, exact[2], EPS), total)
    found = call(*leaves)
    wanted += torch.autograd.grad(wanted, exact, [each.double() for each in upstream])
    found += torch.autograd.grad(found, leaves, upstream)
    for mine, theirs in zip(found, wanted, strict=True):
        hold(call.__name__, mine, theirs, CONTRACTS["cast_after"].gradients["bfloat16"].norm)


def within(model: PreTrainedModel) -> None:
    """Give the layers a forward in which the sum before the MLP and its norm are one kernel."""

    def forward(self: nn.Module, hidden: Tensor, **given: Any) -> Tensor:
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden), **given)
        normalised, total = with_residual(self.post_attention_layernorm, attended, hidden)
        return total + self.mlp(normalised)

    for layer in model.model.layers:
        vars(layer)["forward"] = MethodType(forward, layer)


def across(model: PreTrainedModel) -> None:
    """As :func:`within`, and a layer hands on its MLP's output and the sum before it, which the next norm adds."""

    def forward(self: nn.Module, hidden: Any, **given: Any) -> tuple[Tensor, Tensor]:
        if isinstance(hidden, tuple):
            normalised, hidden = with_residual(self.input_layernorm, *hidden)
        else:  # the first layer's
            normalised = self.input_layernorm(hidden)
        attended, _ = self.self_attn(hidden_states=normalised, **given)
        normalised, total = with_residual(self.post_attention_layernorm, attended, hidden)
        return self.mlp(normalised), total

    for layer in model.model.layers:
        vars(layer)["forward"] = MethodType(forward, layer)
    last = model.model.norm
    vars(last)["forward"] = MethodType(lambda self, hidden: with_residual(self, *hidden)[0], last)


def with_residual(norm: nn.Module, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    return quack(x, residual, norm.weight, norm.variance_epsilon)


CONTENDERS: dict[str, Callable[[PreTrainedModel], None]] = {TWO: lambda model: None, WITHIN: within, ACROSS: across}


def measure(name: str) -> dict[str, Any]:
    """Every contender's times, in the order of the turns, its kernels and its loss."""
    runs: dict[str, Callable[[], Tensor]] = {}
    for contender, change in CONTENDERS.items():
        model = build(name)
        bind(model, {"preset": "auto"})
        change(model)
        torch.manual_seed(1)
        inputs = inputs_of(model, BATCH)
        run = step_of(model, AS_A_GRAPH)
        runs[contender] = lambda run=run, inputs=inputs: run(inputs)
        warm_up(runs[contender], times=5)  # the fourth step is captured
    times: dict[str, list[float]] = {contender: [] for contender in runs}
    for _ in range(TURNS):
        for contender, run in runs.items():
            times[contender] += event_milliseconds(run, 1)
    return {
        contender: {"ms": times[contender], "kernels": launches(run), "loss": float(run())}
        for contender, run in runs.items()
    }


def median_and_spread(values: Sequence[float], form: str) -> str:
    low, *_, high = statistics.quantiles(values, n=5)
    return f"{statistics.median(values):{form}} ({low:{form}} to {high:{form}})"


def row(model: str, contender: str, found: dict[str, Any], of_two: dict[str, Any]) -> tuple[str, ...]:
    ratios = [mine / theirs for mine, theirs in zip(found["ms"], of_two["ms"], strict=True)]
    return (
        model,
        contender,
        median_and_spread(found["ms"], ".2f"),
        "1" if found is of_two else median_and_spread(ratios, ".4f"),
        str(found["kernels"]),
        f"{found['loss']:.4f}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="residual_sums_h200")
    options = parser.parse_args()
    data: dict[str, Any] = {"machine": machine(), "alone": {}, "models": {}}
    for width in (1024, 2048, 4096, 7168):
        data["alone"][f"{ROWS} x {width}"] = {call.__name__: alone(call, width) for call in (two_kernels, quack)}
    for model in MODELS:
        data["models"][model] = measure(model)
    shapes = [
        (shape, f"{ms['two_kernels']:.3f}", f"{ms['quack']:.3f}", f"{ms['quack'] / ms['two_kernels']:.2f}")
        for shape, ms in data["alone"].items()
    ]
    note = (
        f"Steps of {BATCH} tokens as CUDA graphs, {TURNS} turns.\n\nForward and backward of a sum and a norm alone:\n\n"
    )
    note += table(("shape", "two kernels, ms", "one, ms", "of the time of two"), shapes)
    rows = [row(model, *each, found[TWO]) for model, found in data["models"].items() for each in found.items()]
    title = "A residual sum and the norm after it, as two kernels and as one, bf16"
    write_results(options.name, title, data, COLUMNS, rows, note, script=__file__)


if __name__ == "__main__":
    main()
