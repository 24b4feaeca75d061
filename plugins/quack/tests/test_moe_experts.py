"""The experts: routing, and the composition on plain products (CPU); the kernel itself on a GPU."""

from __future__ import annotations

import plain_experts
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quack_plugin import SPECS, spec_of

from veomni_conformance import check_kernel
from veomni_core import KernelSpec
from veomni_ops import moe_experts as reference
from veomni_quack.moe_experts import token_sums
from veomni_quack.moe_experts.routing import route


@pytest.fixture(autouse=True)
def _uncompiled_sums():
    """The sums over a token's rows operator by operator: compiling them for a CPU takes longer than all these tests."""
    if torch.cuda.is_available():
        yield
    else:
        with torch.compiler.set_stance("force_eager"):
            yield


def problem(tokens=7, hidden=16, intermediate=8, experts=4, k=2, dtype=torch.float64, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)

    def leaf(*shape, scale=1.0):
        values = scale * torch.randn(*shape, generator=generator, dtype=torch.float64)
        return values.to(device, dtype).requires_grad_()

    index = torch.randint(0, experts, (tokens, k), generator=generator).to(device)
    projections = (
        leaf(experts, 2 * intermediate, hidden, scale=hidden**-0.5),
        leaf(experts, hidden, intermediate, scale=intermediate**-0.5),
    )
    return leaf(tokens, hidden), index, leaf(tokens, k), *projections


def gradients(result, arguments, **options):
    leaves = [tensor for tensor in arguments if tensor.requires_grad]
    return torch.autograd.grad(result, leaves, torch.ones_like(result), **options)


@settings(max_examples=40)
@given(
    tokens=st.integers(0, 60),
    k=st.integers(1, 5),
    experts=st.integers(1, 40),
    highest=st.integers(0, 60),
    seed=st.integers(0, 1000),
)
def test_routes_are_sorted_stably_and_found_again(tokens, k, experts, highest, seed):
    generator = torch.Generator().manual_seed(seed)
    index = torch.randint(-2, highest + 1, (tokens, k), generator=generator)
    routing = route(index, experts)
    dropped = (index < 0) | (index >= experts)
    kept = torch.where(dropped, experts, index).flatten()
    order = sorted(range(tokens * k), key=lambda number: kept[number].item())
    assert routing.route_of_row.tolist() == order
    assert routing.token_of_row.tolist() == [number // k for number in order]
    counts = torch.bincount(kept, minlength=experts + 1)[:experts]
    assert routing.offsets.tolist() == [0, *counts.cumsum(0).tolist()]
    by_row = torch.arange(tokens * k) + 1.0
    found = routing.of_routes(by_row).flatten()
    assert torch.equal(found[routing.route_of_row.long()], torch.where(kept.sort()[0] < experts, by_row, 0.0))
    assert torch.equal(routing.of_rows(index), index.flatten()[order] if tokens else index.flatten())
    for indices in (routing.route_of_row, routing.row_of_route, routing.offsets, routing.token_of_row):
        assert indices.dtype == torch.int32
        assert indices.is_contiguous()


PLAIN = KernelSpec(
    "plain", "moe_experts", "standard", "plain_experts:standard", dtypes=("float32",), description="test double"
)


def test_the_composition_conforms(extent):
    check_kernel(PLAIN, "cpu", "float32", **extent).raise_if_failed()


@settings(max_examples=25)
@given(
    tokens=st.integers(0, 20),
    k=st.integers(1, 3),
    experts=st.integers(1, 6),
    hidden=st.integers(1, 20),
    intermediate=st.integers(1, 12),
    seed=st.integers(0, 1000),
)
def test_the_composition_is_exact_at_any_size(tokens, k, experts, hidden, intermediate, seed):
    arguments = problem(tokens, hidden, intermediate, experts, k, seed=seed)
    arguments[1].add_(torch.randint(-1, 2, arguments[1].shape))  # some below zero, some beyond the last
    wanted, found = reference.standard(*arguments), plain_experts.standard(*arguments)
    # Routing weights are handed to the products in float32, which float64 leaves 1e-7 short.
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    for mine, theirs in zip(gradients(found, arguments), gradients(wanted, arguments), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_backward_twice_gives_the_same_gradients_twice():
    arguments = problem()
    result = plain_experts.standard(*arguments)
    first = gradients(result, arguments, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, gradients(result, arguments), strict=True))


SPEC = spec_of("moe_experts", "standard")
REAL = {"tokens": 4096, "hidden": 2048, "intermediate": 768, "experts": 128, "k": 8}


def real(dtype=torch.bfloat16):
    return problem(**REAL, dtype=dtype, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", SPEC.dtypes)
def test_conformance(dtype):
    check_kernel(SPEC, "cuda", dtype).raise_if_failed()


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(1, 8, 8, 1, 1), (129, 56, 40, 3, 2), (33, 20, 13, 5, 3), (64, 8, 1, 2, 1)])
def test_sizes_that_fill_no_tile_and_no_alignment(sizes):
    tokens, hidden, intermediate, experts, k = sizes
    arguments = problem(tokens, hidden, intermediate, experts, k, torch.bfloat16, "cuda")
    close_to_float64(SPEC.load(), arguments)


def close_to_float64(kernel, arguments):
    exact = tuple(tensor.detach().double().requires_grad_() for tensor in arguments if tensor.is_floating_point())
    hidden, weights, gate_up, down = exact
    wanted = reference.standard(hidden, arguments[1], weights, gate_up, down)
    found = kernel(*arguments)
    pairs = zip((found, *gradients(found, arguments)), (wanted, *gradients(wanted, exact)), strict=True)
    for mine, theirs in pairs:
        assert (mine.double() - theirs).norm() <= 1e-2 * theirs.norm()


@pytest.mark.gpu
def test_a_real_shape_is_close_to_float64():
    close_to_float64(SPEC.load(), real())


@pytest.mark.gpu
def test_many_tokens_dropped_leave_finite_gradients():
    arguments = real()
    arguments[1][::2] = REAL["experts"]
    arguments[1][1::4] = -1
    result = SPEC.load()(*arguments)
    for tensor in (result, *gradients(result, arguments)):
        assert tensor.isfinite().all()
    assert not result[::2].any()


@pytest.mark.gpu
def test_twenty_runs_give_the_same_bits():
    kernel, arguments = SPEC.load(), real()

    def run():
        result = kernel(*arguments)
        return result, *gradients(result, arguments)

    first = run()
    for _ in range(19):
        assert all(torch.equal(a, b) for a, b in zip(run(), first, strict=True))


@pytest.mark.gpu
def test_frozen_projections_get_no_gradient_and_change_no_other():
    kernel, (hidden, index, weights, gate_up, down) = SPEC.load(), real()
    everything = gradients(kernel(hidden, index, weights, gate_up, down), (hidden, weights))
    frozen = (hidden, index, weights, gate_up.detach(), down.detach())
    for mine, theirs in zip(gradients(kernel(*frozen), frozen), everything, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.gpu
def test_compiles_without_a_graph_break():
    torch._dynamo.reset()
    kernel, arguments = SPEC.load(), real()
    wanted = kernel(*arguments)
    found = torch.compile(kernel, fullgraph=True)(*arguments)
    assert torch.equal(found, wanted)
    for mine, theirs in zip(gradients(found, arguments), gradients(wanted, arguments), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.gpu
def test_a_step_reads_nothing_on_the_host_and_can_be_captured():
    kernel, arguments = SPEC.load(), real()

    def run():
        result = kernel(*arguments)
        return result.detach(), *gradients(result, arguments)

    stream = torch.cuda.Stream()  # capture wants everything before it on a stream of its own
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


@pytest.mark.gpu
def test_what_a_step_holds_beyond_its_gradients():
    kernel, arguments = SPEC.load(), real()
    gradients(kernel(*arguments), arguments)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = gradients(kernel(*arguments), arguments)
    torch.cuda.synchronize()
    routes, width = REAL["tokens"] * REAL["k"], 2 * REAL["intermediate"]
    held = sum(tensor.nbytes for tensor in found)
    pre_activations = 2 * routes * width
    # While the last gradient is made: pre-activations, their gradient, the result, and room for indices and sums.
    assert torch.cuda.max_memory_allocated() - before <= held + 2.5 * pre_activations


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_rows_are_compiled_once_for_every_number_of_tokens(dtype):
    torch._dynamo.reset()

    def compared(tokens):
        index = torch.randint(0, 9, (tokens, 3), device="cuda")
        routing, weights = route(index, 8), torch.rand(tokens, 3, device="cuda", dtype=dtype)
        rows = torch.randn(3 * tokens + 1, 256, device="cuda", dtype=dtype)
        for found, formula, more in (
            (token_sums.weighted_sum_of_rows(rows, routing, weights), token_sums._weighted_sum, (weights,)),
            (token_sums.sum_of_rows(rows, routing), token_sums._plain_sum, ()),
        ):
            torch.testing.assert_close(found, formula(rows, routing.row_of_route, *more))

    compared(100)
    with torch.compiler.set_stance("fail_on_recompile"):
        compared(333)
        compared(57)


def test_specs_are_all_deterministic_and_train():
    assert all(spec.deterministic and spec.backward for spec in SPECS)
