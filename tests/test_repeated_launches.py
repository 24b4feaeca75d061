"""A launch is known again only where everything that decides what it writes is the same."""

from __future__ import annotations

import sys

import pytest
import torch
import triton
import triton.language as tl

from veomni_conformance import triton_interpreter

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the kernels themselves")
if not torch.cuda.is_available():
    triton_interpreter.mend_interpreter()
SHIFT = tl.constexpr(1)


@triton.jit
def _twice(x):
    return 2 * x


@triton.jit
def _thrice(x):
    return 3 * x


@triton.jit
def _scale_kernel(values, out, at, factor, count, N: tl.constexpr):
    place = tl.arange(0, N)
    value = tl.load(values + at + place, place < count, 0.0)
    tl.store(out + place, _twice(value) * factor + SHIFT, place < count)


@triton.jit
def _add_kernel(values, totals, N: tl.constexpr):
    place = tl.arange(0, N)
    tl.atomic_add(totals + place, tl.load(values + place))


@triton.jit
def _chain_kernel(values, out, N: tl.constexpr):
    place = tl.arange(0, N)
    tl.store(out + place, tl.load(values + place) + 1)
    tl.store(values + place, tl.load(out + place) * 2)


@triton.jit
def _copy_kernel(values, out, N: tl.constexpr):
    place = tl.arange(0, N)
    tl.store(out + place, tl.load(values + place))


@triton.jit
def _address_kernel(values, out):
    tl.store(out, values.to(tl.int64))


@pytest.fixture
def programs(monkeypatch):
    """The programs that were run, one for each call of it."""
    from triton.runtime.interpreter import interpreter_builder

    run, begin = [], interpreter_builder.set_grid_idx

    def note(*place):
        run.append(place)
        begin(*place)

    monkeypatch.setattr(interpreter_builder, "set_grid_idx", note)
    return run


def scaled(values, at=0, factor=1.0, count=3, fill=None):
    """What the kernel writes, in a result that holds ``fill`` before."""
    out = torch.full((4,), float(len(values)) if fill is None else fill)
    _scale_kernel[(1,)](values, out, at, factor, count, N=4)
    return out.tolist()


def test_the_same_launch_runs_once_whatever_its_result_held(programs):
    values = torch.arange(8.0) + 1
    assert scaled(values, fill=9.0) == [3, 5, 7, 9]
    assert scaled(values.clone(), fill=8.0) == [3, 5, 7, 8]
    assert len(programs) == 1


def test_a_byte_that_is_not_read_may_change_and_one_that_is_may_not(programs):
    values = torch.arange(8.0) + 2
    assert scaled(values) == [5, 7, 9, 8]
    values[3] = 99
    assert scaled(values) == [5, 7, 9, 8] and len(programs) == 1
    values[2] = 10
    assert scaled(values) == [5, 7, 21, 8] and len(programs) == 2


def test_numbers_and_places_decide(programs):
    values = torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0])
    for changed in ({}, {"count": 2}, {"at": 1}, {"factor": 3.0}, {"factor": -0.0}, {"factor": 0.0}, {"factor": 1}):
        scaled(values, **changed)
    scaled(torch.zeros(6)[1:6])
    assert len(programs) == 8


@pytest.mark.parametrize("name, by, expected", [("_twice", _thrice, 16), ("SHIFT", tl.constexpr(5), 15)])
def test_what_the_function_uses_decides(monkeypatch, name, by, expected):
    assert scaled(torch.full((8,), 5.0))[0] == 11
    monkeypatch.setattr(sys.modules[__name__], name, by)
    assert scaled(torch.full((8,), 5.0))[0] == expected


def test_sums_go_on_from_what_is_there(programs):
    values, totals = torch.arange(4.0), torch.zeros(4)
    for launch in range(1, 4):
        _add_kernel[(1,)](values, totals, N=4)
        assert torch.equal(totals, launch * values)
    assert len(programs) == 3


def test_arguments_in_one_memory_are_not_those_in_two(programs):
    values, out = torch.ones(4), torch.ones(4)
    _chain_kernel[(1,)](values, out, N=4)
    assert values.tolist() == [4] * 4 and out.tolist() == [2] * 4
    alone = torch.ones(4)
    _chain_kernel[(1,)](alone, alone, N=4)
    assert alone.tolist() == [4] * 4 and len(programs) == 2


def test_two_functions_are_never_one_launch():
    for kernel, expected in ((_chain_kernel, 2), (_copy_kernel, 1)):
        values, out = torch.ones(4), torch.ones(4)
        kernel[(1,)](values, out, N=4)
        assert out.tolist() == [expected] * 4


def test_memory_that_no_argument_holds_is_read_each_time(programs):
    values, other = torch.arange(4.0), torch.arange(8.0)
    apart = (other.data_ptr() - values.data_ptr()) // 4
    assert scaled(values, at=apart, count=4) == [1, 3, 5, 7]
    other += 1
    assert scaled(values, at=apart, count=4) == [3, 5, 7, 9] and len(programs) == 2


def test_an_address_is_asked_for_each_time():
    for values in (torch.zeros(4), torch.zeros(4)):
        out = torch.zeros(1, dtype=torch.int64)
        _address_kernel[(1,)](values, out)
        assert out.item() == values.data_ptr()
