"""Every kernel against its contract, on the CPU and, where there is one, on a GPU; and what the contract can't ask."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from leaves import leaf

from veomni_conformance import check_kernel
from veomni_core.errors import ConformanceError
from veomni_ops import causal_conv1d, moe_experts, rms_norm
from veomni_ops.contract import Size
from veomni_torch import causal_conv1d as convolutions
from veomni_torch import cross_entropy_loss as chunked
from veomni_torch import delta_rule_in_fixed_order as delta_rules
from veomni_torch import load_balancing_loss as balancing
from veomni_torch import moe_experts as grouped
from veomni_torch import rms_norm as norms
from veomni_torch import rms_norm_gated as gated_norms
from veomni_torch import swiglu_mlp as activations
from veomni_torch import vocabulary_parallel_loss as sharded
from veomni_torch.plugin import veomni_kernels

SPECS = veomni_kernels()
CASES = [pytest.param(spec, dtype, id=f"{spec}-{dtype}") for spec in SPECS for dtype in spec.dtypes]
ON_A_GPU = [each for each in CASES if each.values[0].name != "fixed_order"]


@pytest.mark.thorough(one_per=["spec"])
@pytest.mark.parametrize("spec, dtype", CASES)
def test_conformance(spec, dtype, extent):
    check_kernel(spec, "cpu", dtype, **extent).raise_if_failed()


@pytest.mark.parametrize(
    "part, where", [("a sum", "where each row occurs"), ("the state", "after the state before it")]
)
def test_a_delta_rule_that_depends_on_what_is_beside_a_token_breaks_its_promise(part, where, monkeypatch):
    own = delta_rules._over_tokens

    def sums(x, dim):
        return x.sum(dim, keepdim=True) if x.shape[0] > 6 else x.flip(dim).cumsum(dim).narrow(dim, -1, 1)

    def with_another_state(*args):
        output, final = own(*args)
        return output, final * (1 + 1e-6)  # well within the contract's tolerance

    changed = {"a sum": ("sum_of_halves", sums), "the state": ("_over_tokens", with_another_state)}
    monkeypatch.setattr(delta_rules, *changed[part])
    [spec] = [each for each in SPECS if (each.op_name, each.name) == ("chunk_gated_delta_rule", "fixed_order")]
    with pytest.raises(
        ConformanceError, match=f"promises batch invariance.*{where}|{where}.*promises batch invariance"
    ):
        check_kernel(spec, "cpu", "float32", largest=Size.SMALL, every_form=False).raise_if_failed()


@pytest.mark.gpu
@pytest.mark.parametrize("spec, dtype", ON_A_GPU)
def test_conformance_on_a_gpu(spec, dtype):
    check_kernel(spec, "cuda", dtype).raise_if_failed()


CALLS = {
    "rms_norm": (lambda *a: norms.standard(*a, 1e-6), lambda: (leaf(5, 16), leaf(16))),
    "rms_norm offset": (lambda *a: norms.offset(*a, 1e-6), lambda: (leaf(5, 16), leaf(16))),
    "rms_norm unweighted": (lambda x: norms.unweighted(x, None, 1e-6), lambda: (leaf(5, 16),)),
    "rms_norm_gated": (lambda *a: gated_norms.standard(*a, 1e-6), lambda: (leaf(5, 16), leaf(5, 16), leaf(16))),
    "rms_norm_gated sigmoid": (
        lambda *a: gated_norms.sigmoid(*a, 1e-6),
        lambda: (leaf(5, 16), leaf(5, 16), leaf(16)),
    ),
    "rms_norm_gated gate_first": (
        lambda *a: gated_norms.gate_first(*a, 1e-6, group_size=4),
        lambda: (leaf(5, 16), leaf(5, 16), leaf(16)),
    ),
    "swiglu_mlp": (activations.standard, lambda: (leaf(5, 16), leaf(5, 16))),
    "swiglu_mlp gelu_tanh": (activations.gelu_tanh, lambda: (leaf(5, 16), leaf(5, 16))),
    "causal_conv1d": (
        lambda x, w, b: convolutions.standard(x, w, b, "silu", torch.arange(41)[None].expand(2, -1) // 7),
        lambda: (leaf(2, 6, 41), leaf(6, 4), leaf(6)),
    ),
    "chunk_loss": (
        lambda h, w: chunked.causal(h, w, torch.arange(300) % 11, softcap=4.0),
        lambda: (leaf(300, 8), leaf(11, 8)),
    ),
    "chunk_loss vocabulary_parallel": (
        lambda h, w, b: torch.stack(sharded.vocabulary_parallel(h, w, torch.arange(300) % 33, 11, b, softcap=4.0)),
        lambda: (leaf(300, 8), leaf(11, 8), leaf(11)),
    ),
    "grouped_mm": (
        lambda h, w, u, d: grouped.standard(h, torch.arange(14).view(7, 2) % 5, w, u, d),
        lambda: (leaf(7, 8), leaf(7, 2), leaf(4, 12, 8), leaf(4, 8, 6)),
    ),
    "load_balancing_loss": (lambda a, b: balancing.standard((a, b), 4, 2, None), lambda: (leaf(6, 4), leaf(6, 4))),
}


@pytest.mark.thorough(one_per=["function"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("function, inputs", CALLS.values(), ids=CALLS)
def test_compiles_without_a_graph_break(function, inputs, backend):
    torch._dynamo.reset()
    torch.manual_seed(0)
    arguments = inputs()
    wanted = function(*arguments)
    found = torch.compile(function, backend=backend, fullgraph=True)(*arguments)
    torch.testing.assert_close(found, wanted)
    upstream = torch.randn_like(wanted)
    for mine, theirs in zip(
        torch.autograd.grad(found, arguments, upstream), torch.autograd.grad(wanted, arguments, upstream), strict=True
    ):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("function, inputs", CALLS.values(), ids=CALLS)
def test_backward_twice_gives_the_same_gradients_twice(function, inputs):
    arguments = inputs()
    result = function(*arguments)
    upstream = torch.full_like(result, 3.0)
    first = torch.autograd.grad(result, arguments, upstream, retain_graph=True)
    second = torch.autograd.grad(result, arguments, upstream)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def _saved_bytes(call):
    """Bytes of distinct storages that the graph of a call keeps, its inputs aside."""
    kept: dict[int, int] = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    function, arguments = call
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function(*arguments)
    for argument in filter(torch.is_tensor, arguments):
        kept.pop(argument.untyped_storage().data_ptr(), None)
    return sum(kept.values()), result


def test_what_is_saved_for_backward():
    saved, _ = _saved_bytes((CALLS["swiglu_mlp"][0], (leaf(64, 256), leaf(64, 256))))
    assert saved == 0
    saved, _ = _saved_bytes((convolutions.standard, (leaf(2, 64, 128), leaf(64, 4), leaf(64), "silu")))
    assert saved == 0
    saved, _ = _saved_bytes((CALLS["rms_norm"][0], (leaf(64, 256), leaf(256))))
    assert saved == 64 * 4
    labels = torch.arange(3000) % 128

    def one_shard(hidden, weight):
        return torch.stack(sharded.vocabulary_parallel(hidden, weight, labels, 64))

    saved, _ = _saved_bytes((one_shard, (leaf(3000, 8), leaf(64, 8))))
    assert saved <= 3000 * (4 + 8 + 1 + 1)  # the log of each token's sum, its word, whether it counts, and is here
    logits = (leaf(64, 32), leaf(64, 32))
    saved, _ = _saved_bytes((lambda a, b: balancing.standard((a, b), 32, 2, None), logits))
    assert saved <= 32 * 4


@given(
    rows=st.integers(0, 5),
    width=st.integers(1, 70),
    variant=st.sampled_from(["standard", "cast_after", "offset"]),
    dtypes=st.sampled_from([(torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32,) * 2]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60)
def test_rms_norm_rounds_as_the_reference_for_any_pair_of_dtypes(rows, width, variant, dtypes, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator).to(dtypes[0])
    weight = torch.randn(width, generator=generator).to(dtypes[1])
    found, wanted = getattr(norms, variant)(x, weight, 1e-6), getattr(rms_norm, variant)(x, weight, 1e-6)
    assert found.dtype == wanted.dtype
    assert torch.equal(found, wanted)


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=9),
    width=st.integers(1, 5),
    tile=st.sampled_from([1, 400, 2000]),
    transposed=st.booleans(),
    silu=st.sampled_from([None, "silu"]),
)
@settings(max_examples=60)
def test_a_convolution_of_any_packed_row_in_any_tiles(lengths, width, tile, transposed, silu):
    torch.manual_seed(0)
    x = torch.randn(1, sum(lengths), 3).transpose(1, 2)
    x = (x if transposed else x.contiguous()).requires_grad_()
    weight, bias = leaf(3, width), leaf(3)
    seq_idx = causal_conv1d.numbered(lengths, x.device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convolutions, "_CPU_TILE_BYTES", tile)
        patch.setattr(convolutions, "_LEAST_POSITIONS", 1)
        found = convolutions.standard(x, weight, bias, silu, seq_idx)
        upstream = torch.randn_like(found)
        gradients = torch.autograd.grad(found, (x, weight, bias), upstream)
    parts = [causal_conv1d.standard(part, weight, bias, silu) for part in x.split(lengths, dim=2)]
    wanted = torch.cat(parts, dim=2)  # each sequence alone
    torch.testing.assert_close(found, wanted)
    for mine, theirs in zip(gradients, torch.autograd.grad(wanted, (x, weight, bias), upstream), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@given(data=st.data(), tokens=st.integers(0, 9), k=st.integers(1, 4), experts=st.integers(1, 6))
@settings(max_examples=60)
def test_experts_for_any_routing(data, tokens, k, experts):
    flat = data.draw(st.lists(st.integers(0, experts + 1), min_size=tokens * k, max_size=tokens * k))
    index = torch.tensor(flat, dtype=torch.long).view(tokens, k)
    torch.manual_seed(0)
    shapes = ((tokens, 8), (tokens, k), (experts, 12, 8), (experts, 8, 6))
    # In float32 gradients of 121 were 1.6e-5 from float64's, and the reference's 2.8e-5.
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    hidden, weights, gate_up, down = inputs
    found = grouped.standard(hidden, index, weights, gate_up, down)
    wanted = moe_experts.standard(hidden, index, weights, gate_up, down)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    upstream = torch.randn_like(wanted)
    for mine, theirs in zip(
        torch.autograd.grad(found, inputs, upstream), torch.autograd.grad(wanted, inputs, upstream), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_the_biases_gradients_of_an_expert_with_many_rows_are_summed_in_float32():
    torch.manual_seed(0)
    shapes = ((2700, 8), (2700, 1), (1, 16, 8), (1, 8, 8), (1, 16), (1, 8))
    inputs = [torch.rand(shape).bfloat16().requires_grad_() for shape in shapes]
    exact = [each.detach().double().requires_grad_() for each in inputs]
    index = torch.zeros(2700, 1, dtype=torch.long)
    gradients = []
    for kernel, (hidden, *others) in ((grouped.clamped, inputs), (moe_experts.clamped, exact)):
        result = kernel(hidden, index, *others)
        gradients.append(torch.autograd.grad(result.sum(), others[-2:]))
    for found, wanted in zip(*gradients, strict=True):
        assert (found.double() - wanted).norm() <= 1e-2 * wanted.norm()


def test_the_gradient_of_experts_biases_is_the_same_on_several_threads():
    call = next(s for s in moe_experts.CONTRACTS["clamped"].beyond_a_tile(torch.device("cpu"), torch.float32))
    leaves = [each for each in (*call.args, *call.kwargs.values()) if getattr(each, "requires_grad", False)]
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        first, *others = (
            torch.autograd.grad(grouped.clamped(*call.args, **call.kwargs).sum(), leaves) for _ in range(9)
        )
    finally:
        torch.set_num_threads(threads)
    assert all(map(torch.equal, first * len(others), (each for other in others for each in other)))
