"""A check that ends at the first failure."""

from __future__ import annotations

import pytest
from planted_faults import failures_of, right

from veomni_conformance import check_kernel
from veomni_core import KernelSpec
from veomni_ops import moe_experts
from veomni_ops.contract import Size

called: list[int] = []


def wrong_in_rows_and_where_transposed(gate, up):
    """Its values are wrong in samples of many rows, and whatever is transposed raises."""
    called.append(gate.numel())
    if gate.dim() > 1 and gate.stride(-1) != 1:
        raise ValueError("not transposed")
    result = right(gate, up)
    return result + 1 if gate.numel() > gate.shape[-1] * 7 else result


def _checked(kernel, **options):
    called.clear()
    spec = KernelSpec("quickly", "swiglu_mlp", "standard", f"{__name__}:{kernel.__name__}", dtypes=("float32",))
    return check_kernel(spec, largest=Size.SMALL, **options)


def test_it_ends_at_the_first_failure_and_says_so():
    whole, calls = _checked(wrong_in_rows_and_where_transposed), len(called)
    quick = _checked(wrong_in_rows_and_where_transposed, fail_fast=True)
    assert len(quick.failures) == 1 < len(whole.failures)
    assert any(failure.startswith(quick.failures[0]) for failure in whole.failures)
    assert len(called) < calls / 4
    assert "what follows the first failure" in quick.skipped
    assert "what follows the first failure" not in whole.skipped


@pytest.mark.parametrize("part", [(0, 1), (1, 2)])
def test_a_right_kernel_is_asked_everything(part):
    quick, whole = _checked(right, fail_fast=True, part=part), _checked(right, part=part)
    assert quick.ok and quick.cases == whole.cases and quick.skipped == whole.skipped


def ignores_adapters(*args, gate_up_lora=None, down_lora=None):
    return moe_experts.standard(*args)


@pytest.mark.thorough
def test_it_ends_too_where_a_kernel_computes_what_it_must_refuse():
    (failure,) = failures_of(ignores_adapters, op="moe_experts", fail_fast=True)
    assert "does not declare lora, but computes something" in failure
