"""How a norm is proven: its code is read, then run at its real width in each dtype and mode.

In bf16 and float16, results must agree bit for bit with the variant's reference, except for the rare element that
another order of summation rounds the other way. In float32, values and gradients must agree within a tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from veomni_ops.contract import Contract
from veomni_ops.rms_norm import VALUES
from veomni_transformers.proving import probe
from veomni_transformers.proving.branches import Branches
from veomni_transformers.proving.code_reading import Reading, guarded_names
from veomni_transformers.proving.matching import if_every_branch_ran
from veomni_transformers.proving.proof import Proof
from veomni_transformers.proving.reachable_code import own_function

Inputs = tuple[Tensor | None, ...]
_EPS_NAMES = ("variance_epsilon", "eps", "epsilon", "norm_eps", "layer_norm_eps", "rms_norm_eps")
_BF16, _F16, _F32 = torch.bfloat16, torch.float16, torch.float32
# Dtypes of (input, weight). In float32 Llama's and OLMo 2's norms are equal: only bf16 and float16 tell the variants
# apart. With a bf16 weight, variants that cast the weight in different places are equal too, so it is also float32.
_PAIRS = ((_BF16, _BF16), (_BF16, _F32), (_F16, _F16), (_F16, _F32), (_F32, _F32))
# The largest share of elements that may differ because another order of summation rounds them the other way. With
# another variant about a quarter of the elements differ.
_ROUNDED_APART = 5e-3


@dataclass(frozen=True)
class Case:
    """One input of a norm: leading dimensions, and dtypes and scales of input and weight.

    ``spike``: the first entry of each row is an outlier, about a thousand times larger than the others.
    """

    leading: tuple[int, ...]
    dtype: torch.dtype
    weight_dtype: torch.dtype
    scale: float
    weight_scale: float = 0.5
    spike: bool = False

    def draw(self, width: int) -> tuple[Tensor, Tensor]:
        """The input, and a weight of the same width."""
        x = probe.random(*self.leading, width, scale=self.scale)
        if self.spike:
            x[..., 0] = x[..., 0].abs() * 1e3 + 1e3 * self.scale
        return x.to(self.dtype), probe.random(width, dtype=self.weight_dtype, scale=self.weight_scale, shift=0.3)


def eps_of(module: nn.Module) -> float | None:
    """The epsilon that the module adds under its square root, from the attributes in which models keep it."""
    values = (vars(module).get(name) for name in _EPS_NAMES)
    return next((value for value in values if isinstance(value, float)), None)


def cases(eps: float) -> Iterator[Case]:
    """In every dtype small, usual and large values, an outlier, zeros and a large weight; then several shapes."""
    for dtype, weight_dtype in _PAIRS:
        # At sqrt(eps), eps counts as much as the values do, so that an eps which is read from the wrong place shows.
        for scale in (3.0, eps**0.5, 1e3, 1e6, 1e12):
            if dtype is not _F16 or scale < 1e4:  # float16 ends at 65504
                yield Case((2, 3), dtype, weight_dtype, scale)
        yield Case((3,), dtype, weight_dtype, 0.01, spike=True)
        yield Case((2, 1), dtype, weight_dtype, 0.0)
        yield Case((2, 2), dtype, weight_dtype, 1.0, weight_scale=50.0)
    for leading in ((1,), (5,), (1, 4), (4, 1), (1, 1), (67,), (2, 3, 2), (1, 2, 1)):
        yield Case(leading, _BF16, _F32, 2.0)


def prove_norm(
    module: nn.Module,
    reading: Reading,
    own: Callable[..., Any],
    contracts: Mapping[str, Contract],
    draw: Callable[[Case], Inputs],
    settings: Mapping[str, Any],
) -> Proof:
    """The proof of the first of ``contracts`` whose reference computes what ``own(training, *inputs)`` does.

    Args:
        own: runs the module's own code.
        draw: makes the inputs of one case.
        settings: the reference's other arguments, with ``eps``. They become the proof's detail.
    """
    with probe.seeded():
        branches = Branches(reading.codes, guarded_names(module, reading), own_function(module))
        runs = []
        for case in cases(settings["eps"]):
            inputs = draw(case)
            for training in reading.modes:
                found, error = probe.attempt(partial(branches.run, partial(own, training, *inputs)))
                if error and len(case.leading) == 2:  # hidden states [B, S, H] must run; other shapes need not
                    return Proof(None, error)
                runs.append((case, training, inputs, found))
        if probe.draws_random_numbers(partial(own, True, *draw(Case((2, 3), _F32, _F32, 1.0)))):
            return Proof(None, "it draws random numbers in training mode")
        tried = []
        for variant, contract in contracts.items():
            reference = partial(contract.reference, **settings)
            why_not = next(filter(None, (_mismatch(reference, *run) for run in runs if run[-1] is not None)), "")
            if not why_not:
                why_not = _gradients_differ(reading, own, reference, draw)
            if not why_not:
                evidence = "its own code gave the reference's results in bf16, float16 and float32, and its gradients"
                return if_every_branch_ran(Proof(variant, evidence, settings), variant, branches)
            tried.append(f"{variant}: {why_not}")
    return Proof(None, "; ".join(tried))


def _mismatch(reference: Callable[..., Tensor], case: Case, training: bool, inputs: Inputs, found: Any) -> str:
    wanted = reference(*inputs)
    what = f"{case.dtype} of shape {tuple(inputs[0].shape)}"  # type: ignore[union-attr]
    if not isinstance(found, Tensor) or found.dtype != wanted.dtype:
        return f"gives {getattr(found, 'dtype', type(found).__name__)} for {case.dtype}, expected {wanted.dtype}"
    if found.shape != wanted.shape:
        return f"gives shape {tuple(found.shape)} for {what}"
    if torch.equal(found, wanted):  # as nearly always; NaNs are looked at below
        return ""
    exact = case.dtype is not _F32
    if exact and (share := _share_differing(found, wanted)) > _ROUNDED_APART:
        return f"{share:.0%} of elements differ for {what} with a {case.weight_dtype} weight"
    if not _within_tolerance(found, wanted):
        return f"values of scale {case.scale:g} differ for {what}" + ("" if training else " in eval mode")
    return ""


def _gradients_differ(
    reading: Reading, own: Callable[..., Any], reference: Callable[..., Tensor], draw: Callable[[Case], Inputs]
) -> str:
    for case in (
        Case((2, 3), _F32, _F32, 1.0),
        Case((1, 4), _F32, _F32, 1e3),
        Case((3,), _F32, _F32, 0.01, spike=True),
    ):
        for training in reading.modes:
            inputs = draw(case)
            differentiable = [tensor.requires_grad_() for tensor in inputs if tensor is not None]
            with probe.own_numbers():
                found, error = probe.attempt(partial(own, training, *inputs))
            if not error and not probe.gradients_close(found, reference(*inputs), differentiable):
                return "gradients differ in float32"
    return ""


def _share_differing(a: Tensor, b: Tensor) -> float:
    """The share of elements that differ; a NaN equals itself."""
    return float(((a != b) & ~(a.isnan() & b.isnan())).double().mean())


def _within_tolerance(found: Tensor, wanted: Tensor) -> bool:
    """Whether each element is within the contract's tolerance."""
    tolerance = VALUES[str(wanted.dtype).removeprefix("torch.")].element
    a, b = found.detach().double(), wanted.detach().double()
    if not torch.equal(a.isfinite(), b.isfinite()):
        return False
    a, b = a.nan_to_num(0.0, 0.0, 0.0), b.nan_to_num(0.0, 0.0, 0.0)
    return bool(((a - b).abs() <= tolerance * (b.abs() + b.square().mean(-1, keepdim=True).sqrt())).all())
