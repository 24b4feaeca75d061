"""Mamba 2's scan against its contract, and what its parts promise."""

from __future__ import annotations

import pytest
import torch

from veomni_conformance import check_kernel
from veomni_ops.contract import Size
from veomni_ops.mamba2_scan import standard as recurrence
from veomni_triton import mamba2_scan as kernels
from veomni_triton.mamba2_scan import launch
from veomni_triton.plugin import veomni_kernels

SPEC = next(spec for spec in veomni_kernels() if spec.op_name == "mamba2_scan")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter runs one element after the other.
SAMPLES = {} if DEVICE == "cuda" else {"largest": Size.SMALL, "every_form": False}


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", SPEC.dtypes)
def test_conformance(dtype):
    check_kernel(SPEC, DEVICE, dtype, **SAMPLES).raise_if_failed()


def drawn(length=40, heads=4, groups=2, width=16, state=16, dtype=torch.float32, decay=1.0):
    """x, dt, A, B, C, D and the bias."""
    torch.manual_seed(0)
    x, B, C = (torch.randn(1, length, *size, dtype=dtype) for size in ((heads, width), *((groups, state),) * 2))
    dt, A = torch.randn(1, length, heads, dtype=dtype), -torch.rand(heads) * decay
    inputs = (x, dt, A, B * state**-0.5, C * state**-0.5, torch.randn(heads), torch.randn(heads) - 2.0)
    return [each.to(DEVICE).requires_grad_() for each in inputs]


def gradients(scan, inputs, **options):
    output, _ = scan(*inputs, dt_softplus=True, **options)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    return torch.autograd.grad(output, inputs, weights.to(output.dtype))


@pytest.mark.parametrize(
    "shape",
    [{"width": 64, "state": 64}, pytest.param({"width": 128, "state": 256}, marks=pytest.mark.thorough)],
    ids=["one tile", "two tiles each"],
)
def test_decays_gain_what_the_recurrence_gives_them_in_bfloat16(shape):
    """The gradient of A is the sum of small numbers beside large ones, over sequences of many chunks."""
    inputs = drawn(200, 2, 1, dtype=torch.bfloat16, decay=0.1, **shape)
    options = {"seq_idx": (torch.arange(200, device=DEVICE) >= 150).int()[None]}
    exact = gradients(recurrence, [x.detach().double().requires_grad_() for x in inputs], **options)
    for name, mine, true in zip(
        ["x", "dt", "A", "B", "C", "D", "bias"], gradients(kernels.standard, inputs, **options), exact, strict=True
    ):
        assert (mine.double() - true).norm() <= 6e-3 * true.norm(), name


def test_no_result_depends_on_the_length_of_chunks(monkeypatch):
    inputs, found = drawn(70, 2, 1), []
    for chunk in (16, 64):
        monkeypatch.setattr(launch, "FLOAT32", launch.replace(launch.FLOAT32, chunk=chunk))
        found.append(gradients(kernels.standard, inputs))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_autograd_keeps_the_inputs_alone():
    inputs, kept = drawn(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        kernels.standard(*inputs)
    assert {x.data_ptr() for x in kept} == {x.data_ptr() for x in inputs}


def test_compiles_without_a_graph_break():
    inputs = drawn()

    def call(*inputs):
        return kernels.standard(*inputs, dt_softplus=True, return_final_states=True)

    wanted, found = call(*inputs), torch.compile(call, backend="aot_eager", fullgraph=True)(*inputs)
    weights = [torch.randn_like(x) for x in wanted]
    for mine, theirs in zip(
        (*found, *torch.autograd.grad(found, inputs, weights)),
        (*wanted, *torch.autograd.grad(wanted, inputs, weights)),
        strict=True,
    ):
        assert torch.equal(mine, theirs)


def test_other_dtypes_are_refused():
    x, dt, A, B, C, *_ = drawn(3)
    with pytest.raises(
        TypeError, match=r"x, B and C are .*float64, .*float32 and .*float32; give float32, bfloat16 or"
    ):
        kernels.standard(x.double(), dt, A, B, C)


@pytest.mark.parametrize("heads, most, found", [(128, 16, 16), (24, 16, 12), (7, 16, 7), (17, 16, 1), (1, 16, 1)])
def test_slices_of_a_group_are_equal(heads, most, found):
    assert launch.slice_of_heads(heads, most) == found


@pytest.mark.parametrize(
    "widths, dtype, found",
    [
        ((64, 128), torch.bfloat16, torch.bfloat16),
        ((80, 128), torch.float16, torch.float16),
        ((64, 16), torch.bfloat16, torch.float32),
        ((65, 128), torch.bfloat16, torch.float32),
        ((64, 128), torch.float32, torch.float32),
    ],
)
def test_narrow_heads_are_multiplied_in_float32(widths, dtype, found):
    assert launch.operand_dtype(*widths, dtype, dtype, dtype) == found
