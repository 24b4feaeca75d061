"""causal_conv1d's Triton kernels against their contract, and what the contract can't ask.

Without a GPU they run in Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from veomni_conformance import check_kernel
from veomni_ops.causal_conv1d import numbered
from veomni_ops.causal_conv1d import standard as reference
from veomni_ops.contract import Size
from veomni_triton.causal_conv1d import launch, standard
from veomni_triton.causal_conv1d.layout import adjacent_channels, adjacent_positions, has_adjacent_positions
from veomni_triton.plugin import veomni_kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter runs one element after the other.
SAMPLES = {} if DEVICE == "cuda" else {"largest": Size.SMALL, "every_form": False}
SPEC = next(spec for spec in veomni_kernels() if spec.op_name == "causal_conv1d")
LAYOUTS = ("channels", "positions")


def drawn(*shape, dtype="float32", seed=0):
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return values.to(DEVICE, getattr(torch, dtype))


def laid_out(batch, channels, positions, adjacent, dtype="float32", seed=0):
    """``[B, C, S]`` with adjacent channels or positions."""
    if adjacent == "positions":
        return drawn(batch, channels, positions, dtype=dtype, seed=seed)
    return drawn(batch, positions, channels, dtype=dtype, seed=seed).transpose(1, 2)


def leaves_of(x, width=4, bias=True, dtype="float32"):
    channels = x.shape[1]
    leaves = [x, drawn(channels, width, dtype=dtype, seed=1), *([drawn(channels, dtype=dtype, seed=2)] if bias else [])]
    return [leaf.detach().requires_grad_() for leaf in leaves]


def with_gradients(function, leaves, upstream, activation="silu", seq_idx=None):
    """The result, and the gradients of x, the weight and, where there is one, the bias."""
    x, weight, *bias = leaves
    result = function(x, weight, bias[0] if bias else None, activation, seq_idx)
    return (result.detach(), *torch.autograd.grad(result, leaves, upstream))


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_conformance(dtype):
    check_kernel(SPEC, DEVICE, dtype, **SAMPLES).raise_if_failed()


@pytest.mark.thorough(one_per=["adjacent", "width"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("positions", [5, 8, 41, 256])
@pytest.mark.parametrize("width", [1, 2, 4, 7])
@pytest.mark.parametrize("adjacent", LAYOUTS)
def test_both_layouts_and_every_length_of_a_run(adjacent, width, positions, packed):
    x = laid_out(2, 6, positions, adjacent)
    assert has_adjacent_positions(x) == (adjacent == "positions" and positions % 4 == 0)
    seq_idx = (drawn(2, positions, seed=3) > 1).cumsum(1) if packed else None
    leaves, upstream = leaves_of(x, width), laid_out(2, 6, positions, adjacent, seed=4)
    found = with_gradients(standard, leaves, upstream, seq_idx=seq_idx)
    wanted = with_gradients(reference, leaves, upstream, seq_idx=seq_idx)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("first, copied", [(0, False), (4, False), (1, True)])
@pytest.mark.parametrize("adjacent", LAYOUTS)
def test_what_vectors_could_not_load_is_copied(adjacent, first, copied):
    lines = torch.arange(2 * 8 * 16 + 8.0)[first:][: 2 * 8 * 16].view(2, 8, 16)
    x, read_as = (lines, adjacent_positions) if adjacent == "positions" else (lines.mT, adjacent_channels)
    read = read_as(x)
    assert torch.equal(read, x) and read.stride() == x.stride()
    assert read.data_ptr() % 16 == 0 and (read.data_ptr() != x.data_ptr()) == copied


@pytest.mark.parametrize("adjacent", LAYOUTS)
def test_results_are_laid_out_as_x(adjacent):
    leaves = leaves_of(laid_out(2, 6, 16, adjacent))
    result, dx, *_ = with_gradients(standard, leaves, torch.ones(2, 6, 16, device=DEVICE))
    assert result.stride() == dx.stride() == leaves[0].stride()


@pytest.mark.thorough(one_per=["adjacent"])
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("adjacent", LAYOUTS)
def test_nothing_passes_from_one_packed_sequence_to_another(adjacent, broken):
    """Neither a NaN of x nor one of the incoming gradient; lengths are those of boundaries within and between steps."""
    lengths = [3, 13, 1, 1, 6, 24]
    seq_idx, positions = numbered(lengths, torch.device(DEVICE)), sum(lengths)
    x, upstream = (laid_out(1, 5, positions, adjacent, seed=seed) for seed in (0, 4))
    wanted = with_gradients(standard, leaves_of(x), upstream, seq_idx=seq_idx)
    for number in range(len(lengths)):
        own = seq_idx[0] == number
        for place in (0, 1):
            inputs = [x.clone(), upstream.clone()]
            inputs[place][:, :, own] = broken
            found = with_gradients(standard, leaves_of(inputs[0]), inputs[1], seq_idx=seq_idx)
            for mine, right in zip(found[:2], wanted[:2], strict=True):  # the result, and the gradient of x
                assert torch.equal(mine[..., ~own], right[..., ~own])


@pytest.mark.parametrize("adjacent", LAYOUTS)
def test_a_tap_that_meets_no_position_is_not_used(adjacent):
    """Were zeros multiplied with it, a NaN in the tap would reach the first positions, and the last gradients."""
    x, upstream = (laid_out(1, 3, 16, adjacent, seed=seed) for seed in (0, 4))
    leaves = leaves_of(x, width=4)
    with torch.no_grad():
        leaves[1][:, 1] = float("nan")  # of two positions earlier
    result, dx, *_ = with_gradients(standard, leaves, upstream, activation=None)
    assert result[..., :2].isfinite().all() and result[..., 2:].isnan().all()
    assert dx[..., -2:].isfinite().all() and dx[..., :-2].isnan().all()


@pytest.mark.parametrize("adjacent", LAYOUTS)
def test_an_infinite_end_spoils_no_gradient_of_a_tap_that_does_not_see_it(adjacent):
    x, upstream = (laid_out(1, 3, 16, adjacent, seed=seed) for seed in (0, 4))
    x[..., -1] = float("inf")
    found = with_gradients(standard, leaves_of(x), upstream, activation=None)[2]
    wanted = with_gradients(reference, leaves_of(x), upstream, activation=None)[2]
    torch.testing.assert_close(found, wanted)
    assert found[:, :-1].isfinite().all()


@pytest.mark.parametrize("adjacent", LAYOUTS)
def test_packed_equals_separate_bit_for_bit(adjacent):
    lengths = [8, 16, 8, 32]
    seq_idx = numbered(lengths, torch.device(DEVICE))
    x, upstream = (laid_out(1, 5, sum(lengths), adjacent, seed=seed) for seed in (0, 4))
    together = with_gradients(standard, leaves_of(x), upstream, seq_idx=seq_idx)[:2]
    apart = [
        with_gradients(standard, leaves_of(a), b)[:2]
        for a, b in zip(x.split(lengths, 2), upstream.split(lengths, 2), strict=True)
    ]
    for whole, parts in zip(together, zip(*apart, strict=True), strict=True):
        assert torch.equal(whole, torch.cat(parts, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("adjacent", LAYOUTS)
def test_twenty_runs_give_the_same_bits(adjacent):
    leaves = leaves_of(laid_out(2, 4096, 2048, adjacent, "bfloat16"), dtype="bfloat16")
    upstream = laid_out(2, 4096, 2048, adjacent, "bfloat16", seed=4)
    first = with_gradients(standard, leaves, upstream)
    for _ in range(19):
        assert all(torch.equal(a, b) for a, b in zip(first, with_gradients(standard, leaves, upstream), strict=True))


@pytest.mark.skipif(DEVICE == "cuda", reason="on a GPU most strides are compiled anew")
@given(
    shape=st.tuples(st.integers(0, 3), st.integers(1, 9), st.integers(1, 40)),
    order=st.permutations([0, 1, 2]),
    padding=st.integers(0, 3),
    width=st.integers(1, 5),
    packed=st.booleans(),
    activation=st.sampled_from([None, "silu", "swish"]),
    seed=st.integers(0, 1000),
)
@settings(deadline=None, max_examples=40)
def test_any_shape_and_any_strides(shape, order, padding, width, packed, activation, seed):
    padded = drawn(*(shape[place] + padding for place in order), seed=seed)
    x = padded.permute([order.index(place) for place in range(3)])[tuple(slice(padding, None) for _ in range(3))]
    leaves, upstream = leaves_of(x, width, bias=seed % 2 == 0), drawn(*shape, seed=seed + 4)
    seq_idx = (drawn(shape[0], shape[2], seed=seed) > 1).cumsum(1).int() if packed else None
    found = with_gradients(standard, leaves, upstream, activation, seq_idx)
    wanted = with_gradients(reference, leaves, upstream, activation, seq_idx)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("adjacent", LAYOUTS)
def test_compiles_without_a_graph_break(adjacent, packed):
    torch._dynamo.reset()
    leaves, upstream = leaves_of(laid_out(2, 6, 16, adjacent)), laid_out(2, 6, 16, adjacent, seed=4)
    seq_idx = (drawn(2, 16, seed=3) > 1).cumsum(1) if packed else None
    compiled = torch.compile(standard, backend="aot_eager", fullgraph=True)
    both = (with_gradients(function, leaves, upstream, seq_idx=seq_idx) for function in (compiled, standard))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*both, strict=True))


@pytest.mark.parametrize("adjacent", LAYOUTS)
def test_operators_are_what_they_declare(adjacent):
    """Schema, fake results (with dynamic shapes too) and the absence of hidden writes, by PyTorch's own check."""
    x, weight, bias = laid_out(2, 6, 16, adjacent), drawn(6, 4), drawn(6)
    seq_idx = torch.zeros(2, 16, dtype=torch.int32, device=DEVICE)
    operators = torch.ops.veomni_triton
    torch.library.opcheck(operators.causal_conv1d.default, (x, weight, bias, seq_idx, True))
    torch.library.opcheck(operators.causal_conv1d_gradients.default, (x, x, weight, None, None, False))


def test_gradients_have_the_dtypes_of_their_tensors():
    x = laid_out(1, 6, 16, "channels", "bfloat16")
    leaves = [x.requires_grad_(), drawn(6, 4, seed=1).requires_grad_(), drawn(6, dtype="float16").requires_grad_()]
    result = standard(*leaves, "silu")
    gradients = torch.autograd.grad(result, leaves, torch.ones_like(result))
    assert [each.dtype for each in (result, *gradients)] == [x.dtype, *(leaf.dtype for leaf in leaves)]


def test_second_derivatives_are_refused():
    leaves = leaves_of(laid_out(1, 6, 16, "channels"))
    with pytest.raises(RuntimeError, match="veomni_triton.causal_conv1d computes no second derivatives"):
        torch.autograd.grad(standard(*leaves).square().sum(), leaves, create_graph=True)


def test_saves_only_its_inputs():
    leaves, saved = leaves_of(laid_out(1, 6, 16, "channels")), []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        standard(*leaves, "silu")
    assert {tensor.data_ptr() for tensor in saved} == {leaf.data_ptr() for leaf in leaves}


@pytest.mark.parametrize("dtype", ["float64", "int64"])
def test_another_dtype_is_refused(dtype):
    with pytest.raises(TypeError, match=f"causal_conv1d takes float32, bfloat16 or float16, not torch.{dtype}"):
        standard(torch.ones(1, 2, 3, dtype=getattr(torch, dtype)), torch.ones(2, 4))


@pytest.mark.parametrize(
    "table",
    [launch.CHANNELS_FORWARD, launch.CHANNELS_BACKWARD, launch.POSITIONS_FORWARD, launch.POSITIONS_BACKWARD],
    ids=["channels, forward", "channels, backward", "positions, forward", "positions, backward"],
)
def test_runs_cover_every_position_once(table):
    assert table.programs * table.warps * 32 * table.registers <= 65536
    for batch, channels, positions in ((1, 8192, 16384), (3, 10, 37), (64, 4096, 1), (1, 5, 100_000)):
        x = torch.empty(batch, channels, positions, device="meta")
        run = table.run(x)
        assert run % table.step == 0
        runs = -(-positions // run)
        assert (runs - 1) * run < positions <= runs * run
        assert table.grid(x) == (batch * -(-channels // table.channels) * runs,)
