"""rms_norm_gated's Triton kernels against their contracts, and what the contracts can't ask.

Without a GPU they run in Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from veomni_conformance import check_kernel
from veomni_ops import rms_norm_gated as reference
from veomni_ops.contract import Size
from veomni_triton import rms_norm_gated
from veomni_triton.plugin import veomni_kernels
from veomni_triton.rms_norm_gated.launch import WHOLE_GROUP, backward_launch, forward_launch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter runs one element after the other.
SAMPLES = {} if DEVICE == "cuda" else {"largest": Size.SMALL, "every_form": False}
SPECS = [spec for spec in veomni_kernels() if spec.op_name == "rms_norm_gated"]
VARIANTS = ("standard", "sigmoid", "gate_first")


def drawn(*shape, dtype="float32", seed=0):
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return values.to(DEVICE, getattr(torch, dtype))


def inputs(rows, width, dtype="float32"):
    """x, the gate and the weight, as leaves."""
    shapes = ((rows, width), (rows, width), (width,))
    return [drawn(*shape, dtype=dtype, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)]


def with_gradients(norm, leaves, upstream, group_size=None):
    """The result, and the gradients of x, the gate and the weight."""
    result = norm(*leaves, 1e-6, group_size)
    return (result.detach(), *torch.autograd.grad(result, leaves, upstream.to(result.dtype)))


@pytest.mark.thorough(one_per=["spec"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_conformance(spec, dtype):
    check_kernel(spec, DEVICE, dtype, **SAMPLES).raise_if_failed()


@pytest.mark.parametrize("group_size", [None, 40])
@pytest.mark.parametrize("variant", VARIANTS)
def test_bfloat16_is_rounded_where_the_reference_rounds(variant, group_size):
    leaves = inputs(33, 160, "bfloat16")
    found = getattr(rms_norm_gated, variant)(*leaves, 1e-6, group_size)
    wanted = getattr(reference, variant)(*leaves, 1e-6, group_size)
    # Rounded at another place, a quarter of the elements differ; another order of summation moves one in hundreds.
    assert (found != wanted).double().mean() < 0.01


@pytest.mark.parametrize(
    "dtypes", ["bfloat16 float32 bfloat16", "bfloat16 bfloat16 float32", "float32 float16 float16"]
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_inputs_of_different_dtypes_are_rounded_as_the_reference_does(variant, dtypes):
    shapes = ((9, 160), (9, 160), (160,))
    leaves = [
        drawn(*shape, dtype=dtype, seed=seed).requires_grad_()
        for seed, (shape, dtype) in enumerate(zip(shapes, dtypes.split(), strict=True))
    ]
    upstream = drawn(9, 160, seed=3)
    wanted = getattr(reference, variant)(*leaves, 1e-6)
    found, *gradients = with_gradients(getattr(rms_norm_gated, variant), leaves, upstream)
    assert [each.dtype for each in (found, *gradients)] == [each.dtype for each in (wanted, *leaves)]
    differ = (found.double() - wanted.double()).abs() > 1e-6 * wanted.double().abs()
    assert differ.double().mean() < 0.03


@pytest.mark.thorough(one_per=["variant", "dtype"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "width, group_size", [(64, None), (97, None), (200, 40), (2048, 1024), (8200, None), (4112, 2056)]
)
@pytest.mark.parametrize("variant", ["standard", "gate_first"])
def test_a_row_does_not_depend_on_its_batch(variant, width, group_size, dtype):
    """Bit for bit: alone, elsewhere in memory (aligned otherwise), in a larger batch, and between other columns."""
    x, gate, upstream = (drawn(5, width, dtype=dtype, seed=seed) for seed in range(3))
    weight = drawn(width, dtype=dtype, seed=3)

    def results(x, gate, upstream):
        leaves = [x.detach().requires_grad_(), gate.detach().requires_grad_()]
        result = getattr(rms_norm_gated, variant)(*leaves, weight, 1e-6, group_size)
        return torch.stack((result.detach(), *torch.autograd.grad(result, leaves, upstream)))

    batch = results(x, gate, upstream)
    wider = torch.zeros(5, width + 24, dtype=x.dtype, device=DEVICE)
    wider[:, 8:-16] = x
    assert torch.equal(results(wider[:, 8:-16], gate, upstream), batch)
    assert torch.equal(results(x.repeat(3, 1), gate.repeat(3, 1), upstream.repeat(3, 1)), batch.repeat(1, 3, 1))
    for row in (slice(0, 1), slice(2, 3), slice(4, 5)):
        assert torch.equal(results(x[row], gate[row], upstream[row]), batch[:, row])


@pytest.mark.gpu
@pytest.mark.parametrize("rows, width, group_size", [(4000, 128, None), (3000, 8192, 1024), (300, 20000, None)])
def test_twenty_runs_give_the_same_bits(rows, width, group_size):
    leaves, upstream = inputs(rows, width, "bfloat16"), drawn(rows, width, seed=3)
    first = with_gradients(rms_norm_gated.gate_first, leaves, upstream, group_size)
    for _ in range(19):
        again = with_gradients(rms_norm_gated.gate_first, leaves, upstream, group_size)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.thorough(one_per=["variant"])
@pytest.mark.parametrize(
    "rows, width, group_size", [(3, 8192, None), (3, 8193, None), (2, 16400, 8200), (0, 8193, None)]
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_on_both_sides_of_what_one_program_can_hold(variant, rows, width, group_size):
    leaves, upstream = inputs(rows, width), drawn(rows, width, seed=3)
    found = with_gradients(getattr(rms_norm_gated, variant), leaves, upstream, group_size)
    wanted = with_gradients(getattr(reference, variant), leaves, upstream, group_size)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(DEVICE == "cuda", reason="on a GPU every width is compiled anew")
@given(
    shape=st.lists(st.integers(0, 4), max_size=3),
    groups=st.integers(1, 4),
    size=st.integers(1, 30),
    padding=st.integers(0, 3),
    transposed=st.booleans(),
    variant=st.sampled_from(VARIANTS),
    seed=st.integers(0, 1000),
)
@settings(deadline=None, max_examples=40)
def test_any_shape_and_any_strides(shape, groups, size, padding, transposed, variant, seed):
    width = groups * size
    x = drawn(*shape, width + padding, seed=seed)[..., padding:]
    x = x.transpose(0, -1).contiguous().transpose(0, -1) if transposed else x
    leaves = [
        x.detach().requires_grad_(),
        *(drawn(*s, seed=seed + 1).requires_grad_() for s in ((*shape, width), (width,))),
    ]
    upstream = drawn(*shape, width, seed=seed + 2)
    # An eps that keeps gradients of nearly empty groups, such as those of one element, of the size of the inputs.
    found = getattr(rms_norm_gated, variant)(*leaves, 1e-2, size)
    wanted = getattr(reference, variant)(*leaves, 1e-2, size)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    gradients = torch.autograd.grad(found, leaves, upstream), torch.autograd.grad(wanted, leaves, upstream)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_compiles_without_a_graph_break(variant):
    torch._dynamo.reset()
    function = getattr(rms_norm_gated, variant)
    leaves = [drawn(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(((2, 3, 48), (2, 3, 48), (48,)))]
    wanted = function(*leaves, 1e-6, 16)
    found = torch.compile(function, backend="aot_eager", fullgraph=True)(*leaves, 1e-6, 16)
    upstream = drawn(2, 3, 48, seed=3)
    assert torch.equal(found, wanted)
    gradients = torch.autograd.grad(found, leaves, upstream), torch.autograd.grad(wanted, leaves, upstream)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*gradients, strict=True))


@pytest.mark.parametrize("operator", ["forward", "gradients", "input_gradients"])
def test_operators_are_what_they_declare(operator):
    """Schema, fake results (with dynamic shapes too) and the absence of hidden writes, by PyTorch's own check."""
    x, gate, weight, reciprocal = drawn(2, 3, 48), drawn(2, 3, 48), drawn(48), drawn(6, 3)
    arguments = (x, gate, weight, 1e-6, 3) if operator == "forward" else (x, x, gate, weight, reciprocal)
    operation = getattr(torch.ops.veomni_triton, f"rms_norm_gated_{operator}").default
    torch.library.opcheck(operation, (*arguments, True, False, True))


def test_each_gradient_can_be_wanted_alone():
    leaves, upstream = inputs(5, 96), drawn(5, 96, seed=3)
    _, *wanted = with_gradients(rms_norm_gated.gate_first, leaves, upstream, 32)
    for place in range(3):
        alone = [leaf.detach() for leaf in leaves]
        alone[place].requires_grad_()
        result = rms_norm_gated.gate_first(*alone, 1e-6, 32)
        assert torch.equal(torch.autograd.grad(result, alone[place], upstream)[0], wanted[place])


def test_second_derivatives_are_refused():
    leaves = inputs(5, 96)
    result = rms_norm_gated.sigmoid(*leaves, 1e-6)
    with pytest.raises(RuntimeError, match="veomni_triton.rms_norm_gated computes no second derivatives"):
        torch.autograd.grad(result.square().sum(), leaves, create_graph=True)


def test_saves_one_float32_a_group_besides_its_inputs():
    leaves, saved = inputs(8, 64), []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        rms_norm_gated.standard(*leaves, 1e-6, 16)
    own = [tensor for tensor in saved if all(tensor.data_ptr() != leaf.data_ptr() for leaf in leaves)]
    assert [(tensor.shape, tensor.dtype) for tensor in own] == [((8, 4), torch.float32)]


@pytest.mark.parametrize(
    "x, gate, weight, group_size, error",
    [
        (drawn(2, 8), drawn(2, 8), drawn(7), None, "weight of shape"),
        (drawn(2, 8), drawn(1, 8), drawn(8), None, "gate of the shape of x"),
        (drawn(2, 0), drawn(2, 0), drawn(0), None, "H of at least 1"),
        (drawn(2, 8), drawn(2, 8), drawn(8), 3, "group_size that divides 8 columns, not 3"),
        (drawn(2, 8), drawn(2, 8), drawn(8), 0, "group_size that divides 8 columns, not 0"),
        (drawn(2, 8).double(), drawn(2, 8), drawn(8), None, "not torch.float64"),
        (drawn(2, 8), drawn(2, 8).long(), drawn(8), None, "not torch.int64"),
    ],
    ids=["width", "gate", "empty", "group", "no group", "float64", "integers"],
)
def test_what_it_refuses(x, gate, weight, group_size, error):
    with pytest.raises((TypeError, ValueError), match=error):
        rms_norm_gated.standard(x, gate, weight, 1e-6, group_size)


def test_every_group_that_fits_has_a_launch():
    for width in range(1, WHOLE_GROUP + 1):
        launches = forward_launch(width), backward_launch(width, 2, 227 << 10)
        assert all(launch.rows * width <= 32 * 32 * launch.warps for launch in launches)
        assert launches[1].programs * launches[1].warps * 32 * launches[1].registers <= 65536


def test_the_pipeline_is_as_deep_as_shared_memory_allows():
    stages = {size: backward_launch(8192, 4, size << 10).stages for size in (64, 99, 163, 227)}
    assert stages == {64: 1, 99: 2, 163: 2, 227: 3}
    assert all(backward_launch(8192, 2, size << 10).stages == 3 for size in (99, 163, 227))
