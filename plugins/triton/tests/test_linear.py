"""linear against its contract. Without a GPU it runs in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from veomni_conformance import check_kernel
from veomni_ops.contract import Size
from veomni_triton.linear import product, standard
from veomni_triton.linear.launches import Launch
from veomni_triton.plugin import veomni_kernels

[SPEC] = [spec for spec in veomni_kernels() if spec.op_name == "linear"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SAMPLES = {} if DEVICE == "cuda" else {"largest": Size.SMALL, "every_form": False}


@pytest.mark.parametrize("dtype", SPEC.dtypes)
def test_conformance(dtype):
    check_kernel(SPEC, DEVICE, dtype, **SAMPLES).raise_if_failed()


@pytest.mark.parametrize("sizes", [(1, 16, 8), (70, 40, 24), (33, 136, 200)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_described_tiles_give_the_bits_of_others(sizes, with_bias):
    rows, width, outputs = sizes
    generator = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32  # the interpreter's products are not bf16's
    wide, weight, bias = (
        torch.randn(size, generator=generator).to(DEVICE, dtype)
        for size in ((rows, width + 8), (outputs, width), (outputs,))
    )
    x, bias = wide[:, :width], bias if with_bias else None
    results = [product(x, weight, bias, launch=Launch(32, 32, 16, 4, 2, described)) for described in (False, True)]
    assert torch.equal(*results)
    torch.testing.assert_close(results[0], torch.nn.functional.linear(x, weight, bias))


def test_one_graph_of_any_number_of_rows_has_the_bits_of_eager_calls():
    x, weight, bias = (
        torch.randn(size, generator=torch.Generator().manual_seed(0)) for size in ((70, 40), (24, 40), 24)
    )
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(standard, backend=graphs, dynamic=True, fullgraph=True)
    for rows in (70, 33):
        operands = [each.to(DEVICE) for each in (x[:rows].clone(), weight, bias)]
        assert torch.equal(compiled(*operands), standard(*operands))
    assert graphs.frame_count == 1
