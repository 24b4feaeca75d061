"""rms_norm's Triton kernels against their contracts, and what the contracts can't ask.

Without a GPU they run in Triton's interpreter, which cuts a float32 off instead of rounding it to bfloat16: that dtype
is tested on GPUs only.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from veomni_conformance import check_kernel
from veomni_ops import rms_norm as reference
from veomni_ops.contract import Size
from veomni_triton import rms_norm
from veomni_triton.partial_sums import sum_partials
from veomni_triton.plugin import veomni_kernels
from veomni_triton.rms_norm.launch import backward_launch, fits_whole, forward_launch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter runs one element after the other.
SAMPLES = {} if DEVICE == "cuda" else {"largest": Size.SMALL, "every_form": False}
SPECS = [spec for spec in veomni_kernels() if spec.op_name == "rms_norm"]
WEIGHTED = ("standard", "cast_after", "offset")
VARIANTS = (*WEIGHTED, "unweighted", "unweighted_rounded_scale")


def dtypes(*names):
    return [pytest.param(name, marks=pytest.mark.gpu if "bfloat16" in name else ()) for name in names]


def drawn(*shape, dtype="float32", seed=0):
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return values.to(DEVICE, getattr(torch, dtype))


def with_gradients(variant, x, weight, upstream):
    """The result, and the gradients of ``x`` and of the weight."""
    leaves = [tensor.detach().requires_grad_() for tensor in (x, weight) if tensor is not None]
    result = getattr(rms_norm, variant)(leaves[0], leaves[1] if weight is not None else None, 1e-6)
    return (result.detach(), *torch.autograd.grad(result, leaves, upstream.to(result.dtype)))


@pytest.mark.thorough(one_per=["spec"])
@pytest.mark.parametrize("dtype", dtypes("float32", "float16", "bfloat16"))
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_conformance(spec, dtype):
    check_kernel(spec, DEVICE, dtype, **SAMPLES).raise_if_failed()


@pytest.mark.parametrize(
    "pair",
    dtypes("float16 float32", "float32 float16", "bfloat16 float32", "float32 bfloat16", "float16 bfloat16"),
)
@pytest.mark.parametrize("variant", WEIGHTED)
def test_a_weight_of_another_dtype_is_rounded_as_the_reference_does(variant, pair):
    x_dtype, weight_dtype = pair.split()
    x, weight, upstream = drawn(9, 160, dtype=x_dtype), drawn(160, dtype=weight_dtype, seed=1), drawn(9, 160, seed=2)
    wanted = getattr(reference, variant)(x, weight, 1e-6)
    found, dx, dweight = with_gradients(variant, x, weight, upstream)
    assert (found.dtype, dx.dtype, dweight.dtype) == (wanted.dtype, x.dtype, weight.dtype)
    # Rounded at another place, a quarter of the elements differ; another order of summation moves one in hundreds.
    differ = (found.double() - wanted.double()).abs() > 1e-6 * wanted.double().abs()
    assert differ.double().mean() < 0.03


@pytest.mark.parametrize("dtype", dtypes("float32", "bfloat16"))
@pytest.mark.parametrize("width", [64, 97, 200, 2048, 8200, pytest.param(16400, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("variant", ["standard", "unweighted"])
def test_a_row_does_not_depend_on_its_batch(variant, width, dtype):
    """Bit for bit: alone, elsewhere in memory (aligned otherwise), in a larger batch, and between other columns."""
    x, upstream = drawn(7, width, dtype=dtype), drawn(7, width, dtype=dtype, seed=1)
    weight = drawn(width, dtype=dtype, seed=2) if variant in WEIGHTED else None

    def result_and_gradient(x, upstream):
        leaf = x.detach().requires_grad_()
        result = getattr(rms_norm, variant)(leaf, weight, 1e-6)
        return torch.stack((result.detach(), *torch.autograd.grad(result, leaf, upstream)))

    batch = result_and_gradient(x, upstream)
    wider = torch.zeros(7, width + 24, dtype=x.dtype, device=DEVICE)
    wider[:, 8:-16] = x
    assert torch.equal(result_and_gradient(wider[:, 8:-16], upstream), batch)
    assert torch.equal(result_and_gradient(x.repeat(5, 1), upstream.repeat(5, 1)), batch.repeat(1, 5, 1))
    for row in (slice(0, 1), slice(3, 4), slice(6, 7)):
        assert torch.equal(result_and_gradient(x[row], upstream[row]), batch[:, row])


@pytest.mark.gpu
@pytest.mark.parametrize("rows, width", [(4000, 128), (3000, 4096), (300, 20000)])
def test_twenty_runs_give_the_same_bits(rows, width):
    x, weight, upstream = (drawn(*shape, dtype="bfloat16") for shape in ((rows, width), (width,), (rows, width)))
    first = with_gradients("standard", x, weight, upstream)
    for _ in range(19):
        again = with_gradients("standard", x, weight, upstream)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize(
    "variant, rows, width",
    [
        ("standard", 5, 8193),
        ("standard", 0, 8193),
        ("unweighted", 5, 8193),
        ("unweighted_rounded_scale", 5, 8193),
        ("cast_after", 2, 16400),
        ("offset", 3, 8191),
        pytest.param("standard", 200, 65536, marks=pytest.mark.gpu),
    ],
)
def test_wide_rows(variant, rows, width):
    """On both sides of what one program can hold in float32, and far beyond."""
    leaves = [drawn(rows, width).requires_grad_()]
    leaves += [drawn(width, seed=1).requires_grad_()] if variant in WEIGHTED else []
    weight = leaves[1] if variant in WEIGHTED else None
    found = getattr(rms_norm, variant)(leaves[0], weight, 1e-5)
    wanted = getattr(reference, variant)(leaves[0], weight, 1e-5)
    torch.testing.assert_close(found, wanted)
    upstream = drawn(rows, width, seed=2)
    gradients = torch.autograd.grad(found, leaves, upstream), torch.autograd.grad(wanted, leaves, upstream)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(DEVICE == "cuda", reason="on a GPU every width is compiled anew")
@given(
    shape=st.lists(st.integers(0, 4), max_size=3),
    width=st.integers(1, 70),
    padding=st.integers(0, 3),
    transposed=st.booleans(),
    variant=st.sampled_from(WEIGHTED),
    seed=st.integers(0, 1000),
)
@settings(deadline=None, max_examples=40)
def test_any_shape_and_any_strides(shape, width, padding, transposed, variant, seed):
    x = drawn(*shape, width + padding, seed=seed)[..., padding:]
    x = x.transpose(0, -1).contiguous().transpose(0, -1) if transposed else x
    leaves = (x.detach().requires_grad_(), drawn(width, seed=seed + 1).requires_grad_())
    found, wanted = getattr(rms_norm, variant)(*leaves, 1e-6), getattr(reference, variant)(*leaves, 1e-6)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    upstream = drawn(*shape, width, seed=seed + 2)
    gradients = torch.autograd.grad(found, leaves, upstream), torch.autograd.grad(wanted, leaves, upstream)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_compiles_without_a_graph_break(variant):
    torch._dynamo.reset()
    function = getattr(rms_norm, variant)
    leaves = [drawn(2, 3, 48).requires_grad_()]
    leaves += [drawn(48, seed=1).requires_grad_()] if variant in WEIGHTED else []
    arguments = (*leaves, None)[:2]
    wanted = function(*arguments, 1e-6)
    found = torch.compile(function, backend="aot_eager", fullgraph=True)(*arguments, 1e-6)
    upstream = drawn(2, 3, 48, seed=2)
    assert torch.equal(found, wanted)
    gradients = torch.autograd.grad(found, leaves, upstream), torch.autograd.grad(wanted, leaves, upstream)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*gradients, strict=True))


@pytest.mark.parametrize("programs", [0, 1, 256, 700])
def test_partial_gradients_of_any_number_of_programs_are_added(programs):
    partials, total = drawn(programs, 40), torch.full((40,), torch.nan, device=DEVICE)
    sum_partials(partials, total)
    torch.testing.assert_close(total, partials.sum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("operator", ["forward", "gradients", "input_gradient"])
def test_operators_are_what_they_declare(operator):
    """Schema, fake results (with dynamic shapes too) and the absence of hidden writes, by PyTorch's own check."""
    x, weight, reciprocal = drawn(2, 3, 48), drawn(48), drawn(2, 3)
    arguments = {
        "forward": (x, weight, 1e-6, 0.0, False, True),
        "gradients": (x, x, weight, reciprocal, 0.0),
        "input_gradient": (x, x, None, reciprocal, 0.0),
    }[operator]
    torch.library.opcheck(getattr(torch.ops.veomni_triton, f"rms_norm_{operator}").default, arguments)


def test_backward_twice_gives_the_same_gradients_twice():
    leaves = (drawn(5, 96).requires_grad_(), drawn(96).requires_grad_())
    result = rms_norm.standard(*leaves, 1e-6)
    upstream = drawn(5, 96, seed=1)
    first = torch.autograd.grad(result, leaves, upstream, retain_graph=True)
    second = torch.autograd.grad(result, leaves, upstream)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_second_derivatives_are_refused():
    x = drawn(5, 96).requires_grad_()
    result = rms_norm.unweighted(x, None, 1e-6)
    with pytest.raises(RuntimeError, match="veomni_triton.rms_norm computes no second derivatives"):
        torch.autograd.grad(result.square().sum(), x, create_graph=True)


def test_each_gradient_can_be_wanted_alone():
    x, weight, upstream = drawn(5, 96), drawn(96, seed=1), drawn(5, 96, seed=2)
    _, dx, dweight = with_gradients("standard", x, weight, upstream)
    leaf = x.clone().requires_grad_()
    assert torch.equal(torch.autograd.grad(rms_norm.standard(leaf, weight, 1e-6), leaf, upstream)[0], dx)
    leaf = weight.clone().requires_grad_()
    assert torch.equal(torch.autograd.grad(rms_norm.standard(x, leaf, 1e-6), leaf, upstream)[0], dweight)


def test_an_expanded_incoming_gradient():
    x, weight = drawn(5, 96), drawn(96, seed=1)
    expanded = with_gradients("standard", x, weight, torch.ones((), device=DEVICE).expand(5, 96))
    contiguous = with_gradients("standard", x, weight, torch.ones(5, 96, device=DEVICE))
    assert all(torch.equal(a, b) for a, b in zip(expanded, contiguous, strict=True))


def test_saves_one_float32_a_row_besides_its_inputs():
    leaves = (drawn(8, 64).requires_grad_(), drawn(64).requires_grad_())
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        rms_norm.standard(*leaves, 1e-6)
    own = [tensor for tensor in saved if all(tensor.data_ptr() != leaf.data_ptr() for leaf in leaves)]
    assert [(tensor.shape, tensor.dtype) for tensor in own] == [((8,), torch.float32)]


@pytest.mark.parametrize(
    "x, weight, error",
    [
        (drawn(2, 8), drawn(7), ValueError),
        (drawn(2, 8), drawn(1, 8), ValueError),
        (drawn(2, 0), drawn(0), ValueError),
        (drawn(2, 8).double(), drawn(8), TypeError),
        (drawn(2, 8), drawn(8).long(), TypeError),
    ],
    ids=["width", "rank", "empty", "float64", "integers"],
)
def test_what_it_refuses(x, weight, error):
    with pytest.raises(error):
        rms_norm.standard(x, weight, 1e-6)


@pytest.mark.parametrize("element_size", [2, 4])
def test_every_row_that_fits_has_a_launch(element_size):
    widths = [width for width in range(1, 40000) if fits_whole(width, element_size)]
    assert max(widths) == 32768 // element_size
    for width in widths:
        threads = 32 * min(forward_launch(width, element_size).warps, backward_launch(width, element_size).warps)
        assert width <= 64 * threads
