"""What the contracts can't ask of the experts' kernels: any size, gradients, compilation, accumulation.

Without a GPU they run in Triton's interpreter, in float32: its bf16 products are not products.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from veomni_core.kernels import is_aligned
from veomni_ops import moe_experts as reference
from veomni_triton_moe import moe_experts
from veomni_triton_moe.moe_experts import backward, layer
from veomni_triton_moe.plugin import veomni_kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SPECS = [spec for spec in veomni_kernels() if spec.op_name == "moe_experts"]


def problem(tokens=7, hidden=16, intermediate=8, experts=4, k=2, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def leaf(*shape, scale=1.0):
        values = scale * torch.randn(*shape, generator=generator)
        return values.to(DEVICE, dtype).requires_grad_()

    index = torch.randint(0, experts, (tokens, k), generator=generator).to(DEVICE)
    projections = (
        leaf(experts, 2 * intermediate, hidden, scale=hidden**-0.5),
        leaf(experts, hidden, intermediate, scale=intermediate**-0.5),
    )
    return leaf(tokens, hidden), index, leaf(tokens, k), *projections


def gradients(result, arguments, **options):
    leaves = [tensor for tensor in arguments if tensor.requires_grad]
    return torch.autograd.grad(result, leaves, torch.ones_like(result), **options)


@settings(max_examples=6, deadline=None)
@given(
    tokens=st.integers(1, 40),
    k=st.integers(1, 3),
    experts=st.integers(1, 6),
    hidden=st.integers(1, 40),
    intermediate=st.integers(1, 20),
    seed=st.integers(0, 1000),
)
def test_any_size_equals_the_reference(tokens, k, experts, hidden, intermediate, seed):
    arguments = problem(tokens, hidden, intermediate, experts, k, seed=seed)
    wanted, found = reference.standard(*arguments), moe_experts.standard(*arguments)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    for mine, theirs in zip(gradients(found, arguments), gradients(wanted, arguments), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_backward_twice_gives_the_same_gradients_twice():
    arguments = problem()
    result = moe_experts.standard(*arguments)
    first = gradients(result, arguments, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, gradients(result, arguments), strict=True))


def test_recomputing_gives_the_same_bits_and_saves_no_pre_activations():
    arguments = problem()
    saved, bits = {}, {}
    for kernel in (moe_experts.standard, moe_experts.standard_recomputing):
        sizes = saved[kernel] = []

        def record(tensor, sizes=sizes):
            sizes.append(tuple(tensor.shape))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
            result = kernel(*arguments)
        bits[kernel] = (result, *gradients(result, arguments))
    assert all(torch.equal(a, b) for a, b in zip(*bits.values(), strict=True))
    pre_activations = (14, 16)
    assert pre_activations in saved[moe_experts.standard]
    assert pre_activations not in saved[moe_experts.standard_recomputing]


def test_frozen_projections_are_spared_their_products(monkeypatch):
    hidden, index, weights, gate_up, down = problem()
    everything = gradients(moe_experts.standard(hidden, index, weights, gate_up, down), (hidden, weights))
    monkeypatch.setattr(backward, "weight_gradient", lambda *_: pytest.fail("a frozen weight's gradient was taken"))
    frozen = (hidden, index, weights, gate_up.detach(), down.detach())
    for mine, theirs in zip(gradients(moe_experts.standard(*frozen), frozen), everything, strict=True):
        assert torch.equal(mine, theirs)


CALLS = {
    "standard": moe_experts.standard,
    "recomputing": moe_experts.standard_recomputing,
    "clamped": lambda *arguments: moe_experts.clamped(*arguments, alpha=1.702, limit=0.5, interleaved=True),
}


@pytest.mark.parametrize("kernel", CALLS.values(), ids=CALLS)
def test_compiles_without_a_graph_break(kernel):
    torch._dynamo.reset()
    arguments = problem()
    wanted = kernel(*arguments)
    found = torch.compile(kernel, backend="aot_eager", fullgraph=True)(*arguments)
    assert torch.equal(found, wanted)
    for mine, theirs in zip(gradients(found, arguments), gradients(wanted, arguments), strict=True):
        assert torch.equal(mine, theirs)


REAL = {"tokens": 4096, "hidden": 2048, "intermediate": 768, "experts": 128, "k": 8, "dtype": torch.bfloat16}


@pytest.mark.gpu
def test_a_real_shape_is_close_to_float64():
    arguments = problem(**REAL)
    exact = tuple(
        tensor.detach().double().requires_grad_(tensor.requires_grad)
        for tensor in arguments
        if tensor.is_floating_point()
    )
    hidden, weights, gate_up, down = exact
    wanted = reference.standard(hidden, arguments[1], weights, gate_up, down)
    found = moe_experts.standard(*arguments)
    pairs = zip((found, *gradients(found, arguments)), (wanted, *gradients(wanted, exact)), strict=True)
    for mine, theirs in pairs:
        assert (mine.double() - theirs).norm() <= 1e-2 * theirs.norm()


@pytest.mark.gpu
def test_twenty_runs_give_the_same_bits():
    arguments = problem(**REAL)

    def run():
        result = moe_experts.standard(*arguments)
        return result, *gradients(result, arguments)

    first = run()
    for _ in range(19):
        assert all(torch.equal(a, b) for a, b in zip(run(), first, strict=True))


@pytest.mark.gpu
def test_a_step_reads_nothing_on_the_host_and_can_be_captured():
    arguments = problem(**REAL)

    def run():
        result = moe_experts.standard(*arguments)
        return result.detach(), *gradients(result, arguments)

    # Capture wants everything before it on a stream of its own.
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        wanted = run()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = run()
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(captured, wanted, strict=True))


@pytest.mark.parametrize("descriptors", [False, True])
def test_accumulating_adds_to_the_gradients_that_are_there(descriptors, monkeypatch):
    if DEVICE == "cpu" and descriptors:
        monkeypatch.setattr(layer, "can_be_described", is_aligned)
    dtype = torch.bfloat16 if DEVICE == "cuda" and descriptors else torch.float32
    first, second = problem(tokens=9, dtype=dtype), problem(tokens=6, dtype=dtype, seed=1)
    gate_up, down = first[3:]
    moe_experts.standard_accumulating(*first).sum().backward()
    holders = gate_up.grad, down.grad
    expected = [
        held.double() + new.double()
        for held, new in zip(
            holders,
            torch.autograd.grad(moe_experts.standard(*second[:3], gate_up, down).sum(), (gate_up, down)),
            strict=True,
        )
    ]
    moe_experts.standard_accumulating(*second[:3], gate_up, down).sum().backward()
    assert gate_up.grad is holders[0] and down.grad is holders[1]
    tolerance = 4e-3 if dtype == torch.bfloat16 else 1e-6  # one rounding of the sum, and one of `new` alone
    for held, sums in zip(holders, expected, strict=True):
        assert torch.allclose(held.double(), sums, rtol=tolerance, atol=tolerance * sums.abs().max())


def test_a_hook_still_gets_the_whole_gradient_when_accumulating():
    arguments = problem()
    gate_up = arguments[3]
    moe_experts.standard_accumulating(*arguments).sum().backward()
    alone, seen = gate_up.grad.clone(), []
    gate_up.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad.clone()))
    moe_experts.standard_accumulating(*arguments).sum().backward()
    torch.testing.assert_close(seen[0], 2 * alone)


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_under_autocast_float32_inputs_are_computed_in_its_dtype(spec, dtype):
    arguments = problem(tokens=19, hidden=32, intermediate=16)
    wanted = getattr(reference, spec.variant)(*arguments)
    with torch.autocast(DEVICE, dtype):
        found = spec.load()(*arguments)
    assert found.dtype == torch.float32
    rounding = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    mine, theirs = (found, *gradients(found, arguments)), (wanted, *gradients(wanted, arguments))
    for one, other in zip(mine, theirs, strict=True):
        assert one.dtype == torch.float32
        assert 1e-5 < (one - other).norm() / other.norm() < rounding


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_projections_of_another_dtype_than_hidden_are_refused_by_name(spec):
    hidden, index, weights, gate_up, down = problem()
    with pytest.raises(TypeError, match="fused_triton multiplies tensors of one dtype, but hidden is bf"):
        spec.load()(hidden.bfloat16(), index, weights, gate_up, down)


def test_accumulating_leaves_grad_alone_where_autograd_grad_is_asked():
    arguments = problem()
    hidden, _, _, gate_up, down = arguments
    gate_up.grad, down.grad = torch.ones_like(gate_up), torch.ones_like(down)
    found = gradients(moe_experts.standard_accumulating(*arguments), arguments)
    assert bool((gate_up.grad == 1).all()) and bool((down.grad == 1).all())
    for mine, theirs in zip(found, gradients(reference.standard(*arguments), arguments), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    torch.autograd.backward(moe_experts.standard_accumulating(*arguments).sum(), inputs=[hidden])
    assert bool((gate_up.grad == 1).all())


def test_biases_may_have_strides():
    hidden, index, weights, gate_up, down = problem()
    gate_up_bias = torch.randn(gate_up.shape[0], 2 * gate_up.shape[1], device=DEVICE)[:, ::2].requires_grad_()
    down_bias = torch.randn(1, down.shape[1], device=DEVICE).expand(down.shape[0], -1).requires_grad_()
    arguments = (hidden, index, weights, gate_up, down, gate_up_bias, down_bias)
    found, wanted = moe_experts.clamped(*arguments), reference.clamped(*arguments)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_a_weight_that_is_not_finite_stays_with_its_own_expert():
    """A dropped route's weight counts for nothing; a kept one's spoils its token and its expert alone."""
    hidden, index, weights, gate_up, down = problem(tokens=9)
    index[0], index[1] = torch.tensor([0, 4]), torch.tensor([1, 2])  # expert 4 is nobody's here
    index[2:] = torch.tensor([1, 3])
    biases = [torch.randn(4, 16, device=DEVICE, requires_grad=True) for _ in range(2)]
    with torch.no_grad():
        weights[0] = torch.tensor([float("inf"), float("nan")])
    arguments = (hidden, index, weights, gate_up, down, *biases)
    found, wanted = (function(*arguments) for function in (moe_experts.clamped, reference.clamped))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert found[1:].isfinite().all()
    gradients_of = [
        torch.autograd.grad(each[1:].sum() + each[:1].sum() * 0.5, biases[1])[0] for each in (found, wanted)
    ]
    torch.testing.assert_close(*gradients_of, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert gradients_of[0][1:].isfinite().all() and not gradients_of[0][0].isfinite().any()
