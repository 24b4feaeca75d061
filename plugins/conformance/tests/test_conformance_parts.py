"""A check in parts: together they ask what the whole asks, each case once."""

from __future__ import annotations

import pytest
import torch
from planted_faults import right

from veomni_conformance import check_kernel
from veomni_core import KernelSpec
from veomni_ops.contract import Size

pytestmark = pytest.mark.thorough


def _named(kernel, op="swiglu_mlp", variant="standard"):
    return KernelSpec("parted", op, variant, f"{__name__}:{kernel.__name__}", dtypes=("float32",))


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("count", [1, 2, 3, 40])
def test_parts_together_are_the_whole(count):
    spec = _named(right)
    whole = check_kernel(spec, largest=Size.SMALL)
    parts = [check_kernel(spec, largest=Size.SMALL, part=(index, count)) for index in range(count)]
    names = [case.sample for part in parts for case in part.cases]
    assert sorted(names) == sorted(case.sample for case in whole.cases)
    assert not any(part.failures for part in parts)


seen: list[int] = []


def counted(gate, up):
    seen.append(gate.shape.numel())
    return right(gate, up)


def test_parts_call_a_kernel_as_often_as_the_whole():
    def calls_of(*parts):
        seen.clear()
        for part in parts:
            check_kernel(_named(counted), largest=Size.SMALL, part=part)
        return sorted(seen)

    assert calls_of((0, 2), (1, 2)) == calls_of((0, 1))


def transposed_is_wrong(gate, up):
    if not gate.is_contiguous() and gate.dim() > 1 and gate.shape[0] > 1 and gate.stride(0) == 1:
        return torch.zeros_like(gate) * up
    return right(gate, up)


@pytest.mark.parametrize("count", [1, 3])
def test_a_planted_fault_is_in_exactly_the_part_that_asks_for_it(count):
    parts = [
        check_kernel(_named(transposed_is_wrong), largest=Size.SMALL, part=(index, count)) for index in range(count)
    ]
    failures = [failure for part in parts for failure in part.failures]
    assert any("transposed in memory" in failure for failure in failures)
