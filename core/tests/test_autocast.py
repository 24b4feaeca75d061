"""What autocast casts, asked of PyTorch's own operators."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from veomni_core.kernels import autocast_dtype, cast_as_autocast, product_operands
from veomni_ops.router_softmax import as_softmax_takes

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16, None])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_operands_take_the_dtype_of_a_linears_result(device, dtype, autocast):
    x = torch.randn(4, 8, device=device).to(dtype).requires_grad_()
    with torch.autocast(device, autocast, enabled=autocast is not None):
        wanted = F.linear(x, x).dtype
        found = product_operands("a kernel", x=x, bias=None)
        assert (found[0].dtype, found[1]) == (wanted, None)
        assert as_softmax_takes(x).dtype == torch.softmax(x, dim=-1).dtype
        assert autocast_dtype(device) == autocast
    found[0].sum().backward()
    assert x.grad.dtype == dtype


def test_an_index_is_no_operand_of_a_product():
    index = torch.arange(3)
    with torch.autocast("cpu", torch.bfloat16):
        assert cast_as_autocast(index) is index


def test_a_device_that_autocast_does_not_know_has_it_off():
    x = torch.empty(2, 3, device="meta")
    with torch.autocast("cpu", torch.bfloat16):
        assert autocast_dtype("meta") is None
        assert product_operands("a kernel", x=x) == (x,)
        assert as_softmax_takes(x) is x


def test_operands_that_differ_are_named_with_their_dtypes():
    low, high = torch.empty(2, dtype=torch.bfloat16), torch.empty(2)
    message = "a kernel multiplies tensors of one dtype, but hidden is float32, weight is bfloat16: cast them"
    with pytest.raises(TypeError, match=message):
        product_operands("a kernel", hidden=high, weight=low)
    with torch.autocast("cpu", torch.bfloat16):
        assert {tensor.dtype for tensor in product_operands("a kernel", hidden=high, weight=low)} == {torch.bfloat16}


def test_operands_in_a_dtype_whose_products_are_not_right_are_refused():
    high, halves = torch.empty(2), (torch.bfloat16, torch.float16)
    with pytest.raises(TypeError, match="a kernel computes bfloat16 or float16, not float32: run it under autocast"):
        product_operands("a kernel", dtypes=halves, hidden=high)
    with torch.autocast("cpu", torch.float16):
        assert product_operands("a kernel", dtypes=halves, hidden=high)[0].dtype == torch.float16
