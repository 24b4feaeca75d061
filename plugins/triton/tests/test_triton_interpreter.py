"""What the check's own mends of Triton's interpreter are for."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the kernels themselves")


@triton.jit
def _plus(x, y):
    return x + y


@triton.jit
def _add_kernel(a, b, out, count, N: tl.constexpr):
    column_N = tl.arange(0, N)
    total_N = tl.zeros([N], dtype=out.dtype.element_ty)
    for _ in range(count):
        total_N = _plus(tl.load(a + column_N), tl.load(b + column_N))
    tl.store(out + column_N, total_N)


@triton.jit
def _product_kernel(a, b, out, factor, N: tl.constexpr):
    place_NN = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    product_NN = tl.dot(tl.load(a + place_NN), tl.load(b + place_NN))
    tl.store(out + place_NN, product_NN * factor.to(tl.float32))


@triton.jit
def _sort_kernel(values, out, N: tl.constexpr):
    column_N = tl.arange(0, N)
    tl.store(out + column_N, tl.sort(tl.load(values + column_N)))


@triton.jit
def _scatter_kernel(totals, values, N: tl.constexpr):
    column_N = tl.arange(0, N)
    tl.atomic_add(totals + column_N // 4, tl.load(values + column_N), mask=column_N % 4 < 3)


@triton.jit
def _bounds_kernel(values, out, bound, N: tl.constexpr, NAN: tl.constexpr):
    column_N = tl.arange(0, N)
    value_N = tl.load(values + column_N)
    tl.store(out + column_N, tl.minimum(value_N, bound, propagate_nan=NAN))
    tl.store(out + N + column_N, tl.maximum(value_N, bound, propagate_nan=NAN))
    tl.store(out + 2 * N + column_N, tl.clamp(value_N, -bound, bound, propagate_nan=NAN))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
def test_sums_in_a_loop_of_run_time_length(dtype):
    a, b = torch.arange(16).to(dtype), torch.arange(16).to(dtype) - 7
    out = torch.zeros_like(a)
    _add_kernel[(1,)](a, b, out, 2, N=16)
    assert torch.equal(out, a + b)


def test_bfloat16_is_multiplied_and_rounded_as_on_a_gpu():
    torch.manual_seed(0)
    a, b = torch.randn(16, 16).bfloat16(), torch.randn(16, 16).bfloat16()
    out = torch.empty(16, 16, dtype=torch.bfloat16)
    _product_kernel[(1,)](a, b, out, 0.5, N=16)
    assert torch.equal(out, (a.float() @ b.float() * 0.5).bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_atomic_sums_count_an_address_as_often_as_it_stands_there(dtype):
    totals, values = torch.ones(4, dtype=dtype), torch.arange(16).to(dtype)
    _scatter_kernel[(2,)](totals, values, N=16)
    assert torch.equal(totals, 1 + 2 * values.view(4, 4)[:, :3].sum(dim=1))


def test_sorting():
    values = torch.randperm(64, dtype=torch.int32)
    out = torch.empty_like(values)
    _sort_kernel[(1,)](values, out, N=64)
    assert torch.equal(out, torch.arange(64, dtype=torch.int32))


def test_the_language_is_as_it_was_after_a_launch():
    before = tl.load, tl.tensor.__add__, tl.tensor.__index__ if hasattr(tl.tensor, "__index__") else None
    _add_kernel[(1,)](torch.ones(16), torch.ones(16), torch.ones(16), 1, N=16)
    assert before == (tl.load, tl.tensor.__add__, tl.tensor.__index__ if hasattr(tl.tensor, "__index__") else None)


def test_nan_passes_through_a_minimum_where_the_kernel_says_so_alone():
    nan, values, out = float("nan"), torch.tensor([float("nan"), 1.0, 5.0, -7.0]), torch.empty(3, 4)
    _bounds_kernel[(1,)](values, out, 2.0, N=4, NAN=tl.PropagateNan.ALL)
    expected = [[nan, 1, 2, -7], [nan, 2, 5, 2], [nan, 1, 2, -2]]
    assert torch.equal(out.nan_to_num(99), torch.tensor(expected).nan_to_num(99))
    _bounds_kernel[(1,)](values, out, 2.0, N=4, NAN=tl.PropagateNan.NONE)
    assert out[:, 0].tolist() == [2, 2, -2] and torch.equal(out[:, 1:], torch.tensor(expected)[:, 1:])
