"""What a model's ``causal_conv1d_fn`` computes: its values, gradients and bfloat16 results, beside the contract's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from veomni_core.descriptions.kernel_spec import EAGER
from veomni_ops.causal_conv1d import CONTRACTS
from veomni_transformers.proving import probe
from veomni_transformers.proving.branches import Branches
from veomni_transformers.proving.code_reading import read_function
from veomni_transformers.proving.matching import if_every_branch_ran
from veomni_transformers.proving.package_functions import chosen, written
from veomni_transformers.proving.proof import KEPT_APART, Proof

_CONTRACT = CONTRACTS["standard"]
_WIDTHS = (2, 3, 4)
Function = Callable[..., Any]


def of(function: Function, width: int, home: str) -> Proof:
    """Whether ``function`` is the contract's, for weights of ``width`` too; to be within :func:`probe.seeded`.

    transformers' decorator takes a package's function where one is installed, and the modeling file's otherwise. The
    package's runs on GPUs alone, so the modeling file's is what is compared; the evidence names what the model runs.

    Args:
        home: the modeling file that calls the function.
    """
    own = written(function)
    reading = read_function(own)
    if reading.doubts:
        return Proof(None, reading.doubts[0])
    branches = Branches(reading.codes, frozenset(), inspect.unwrap(own), is_helper=True)  # type: ignore[arg-type]
    compared = partial(branches.run_call, own)
    for inputs, activation in _calls({*_WIDTHS, width}):
        for differs in (_differs, _differs_in_low_precision):
            if why_not := differs(compared, inputs, activation):
                shape, width = list(inputs[0].shape), inputs[1].shape[1]
                return Proof(None, f"{function.__name__}, of x {shape} and width {width}: {why_not}")
    runs = chosen(function, home)
    words = "it" if own is function else "its own plain PyTorch" if runs == EAGER else runs
    evidence = f"{function.__name__} gave the reference's values and gradients; unbound, the model runs {words}"
    needs = ("any_width",) if width not in _WIDTHS else ()
    proof = Proof("standard", evidence, needs=needs, left_out=KEPT_APART)
    return if_every_branch_ran(proof, f"{function.__name__} is standard", branches)


def why_not_step(function: Function, width: int) -> str:
    """Why ``function`` doesn't convolve a token after a state and move that on, or empty; otherwise as :func:`of`."""
    own = written(function)
    reading = read_function(own)
    if reading.doubts:
        return reading.doubts[0]
    branches = Branches(reading.codes, frozenset(), inspect.unwrap(own), is_helper=True)  # type: ignore[arg-type]
    for low, bias, activation in product((False, True), (False, True), (None, "silu")):
        dtype, bound = (torch.bfloat16, _CONTRACT.values["bfloat16"].norm) if low else (torch.float32, 1e-5)
        x, state = (probe.random(2, 5, length, dtype=dtype) for length in (1, width))
        weights = [probe.random(*shape, dtype=dtype) for shape in ((5, width), (5,))[: 1 + bias]]
        seen = torch.cat((state, x), dim=-1)
        wanted = _CONTRACT.reference(seen.double(), *(each.double() for each in weights), activation=activation)[
            ..., -1:
        ]
        found, error = probe.attempt(
            partial(branches.run_call, own, x, state, weights[0], weights[1] if bias else None, activation)
        )
        if error:
            return error
        if not isinstance(found, Tensor) or found.shape != x.shape or found.dtype != dtype:
            return "it returns no tensor like x"
        if not state.equal(seen[..., 1:]):
            return "it leaves another state"
        if float((found.double() - wanted).norm()) > bound * float(wanted.norm()):
            return "it gives other values"
    return branches.never_run()


def _calls(widths: Collection[int]) -> Iterator[tuple[tuple[Tensor, ...], str | None]]:
    """Arguments of each width, with a bias and without, of many positions and of one, of small values and large."""
    sizes = ((2, 5, 11, 1.0), (1, 3, 1, 1.0), (2, 4, 70, 100.0), (1, 3, 9, 1e6))
    for (batch, channels, length, scale), width, bias, activation in product(
        sizes, sorted(widths), (False, True), (None, "silu", "swish")
    ):
        x = probe.random(batch, length, channels, scale=scale).transpose(1, 2)
        weight = probe.random(channels, width)
        yield (x, weight, *([probe.random(channels)] if bias else [])), activation


def _differs(function: Function, inputs: tuple[Tensor, ...], activation: str | None) -> str:
    leaves = tuple(each.detach().requires_grad_() for each in inputs)
    found, error = probe.attempt(lambda: function(*leaves, activation=activation))
    if error:
        return error
    if not isinstance(found, Tensor) or found.shape != inputs[0].shape:
        return "it returns no tensor of x's shape"
    wanted = _CONTRACT.reference(*leaves, activation=activation)
    miss = probe.miss(found, wanted, leaves)
    return f"it misses by {miss:.2%}" if miss else ""


def _differs_in_low_precision(function: Function, inputs: tuple[Tensor, ...], activation: str | None) -> str:
    """In bfloat16, and with a weight in float32 for an input in bfloat16."""
    low = tuple(each.to(torch.bfloat16) for each in inputs)
    for given in (low, (low[0], *(each.float() for each in low[1:]))):
        found, error = probe.attempt(partial(function, *given, activation=activation))
        if error:
            return f"in bfloat16 {error}"
        exact = _CONTRACT.reference(*(each.double() for each in given), activation=activation)
        if found.dtype != torch.bfloat16:
            return f"it is {found.dtype} for an input in bfloat16"
        miss = float((found.double() - exact).norm() / exact.norm())
        if miss > _CONTRACT.values["bfloat16"].norm:
            return f"it misses by {miss:.1%} in bfloat16"
    return ""
