"""What no usual call shows is asked by some sample of each contract: a kernel that is wrong there alone is caught."""

from __future__ import annotations

import pytest
from planted_faults import assert_caught, failures_of
from planted_kinds import FAULTS, eight_choices

from veomni_ops.contract import Size


@pytest.mark.thorough(one_per=["op"])
@pytest.mark.parametrize(
    "op, kernel, words, options",
    [pytest.param(options["op"], kernel, words, options, id=kernel.__name__) for kernel, words, options in FAULTS],
)
def test_a_fault_of_one_kind_of_call_is_caught(op, kernel, words, options):
    assert_caught(kernel, words, largest=Size.BEYOND_A_TILE, **options)


@pytest.mark.thorough
def test_a_ninth_choice_that_is_dropped_is_caught():
    failures = failures_of(eight_choices, "token_dispatch", "exchanged")
    assert any("'65 tokens of nine choices': rank 0: the result is off" in failure for failure in failures), failures
