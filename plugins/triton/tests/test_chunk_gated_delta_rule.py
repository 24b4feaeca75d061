"""The gated delta rule against its contract, and what its parts promise."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from veomni_conformance import check_kernel
from veomni_core import Site
from veomni_ops.contract import Size
from veomni_triton import chunk_gated_delta_rule as kernels
from veomni_triton.chunk_gated_delta_rule.call import token_rows
from veomni_triton.chunk_gated_delta_rule.chunks import most_chunks, tables, tables_of_rows
from veomni_triton.chunk_gated_delta_rule.inverse import unit_lower_inverse
from veomni_triton.chunk_gated_delta_rule.tiles import decays
from veomni_triton.limits import MAX_HEAD_WIDTH, chunk_gated_delta_rule
from veomni_triton.plugin import veomni_kernels

SPECS = [spec for spec in veomni_kernels() if spec.op_name == "chunk_gated_delta_rule"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter runs one element after the other.
SAMPLES = {} if DEVICE == "cuda" else {"largest": Size.SMALL, "every_form": False}


@pytest.mark.thorough
@pytest.mark.parametrize("spec, dtype", [(spec, dtype) for spec in SPECS for dtype in spec.dtypes], ids=str)
def test_conformance(spec, dtype):
    check_kernel(spec, DEVICE, dtype, **SAMPLES).raise_if_failed()


def drawn(batch=1, length=40, heads=(1, 2), width=16, dtype=torch.float32):
    """Query, key, value, g and beta."""
    key_heads, value_heads = heads
    query, key = (torch.randn(batch, length, key_heads, width, device=DEVICE, dtype=dtype) for _ in range(2))
    value = torch.randn(batch, length, value_heads, width, device=DEVICE, dtype=dtype)
    g, beta = -torch.rand(batch, length, value_heads, device=DEVICE), torch.rand(batch, length, value_heads)
    return [x.to(DEVICE).requires_grad_() for x in (query, key, value, g, beta)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_a_fixed_order_a_token_has_the_same_bits_packed_and_one_at_a_time(dtype):
    inputs, kept = [each.detach() for each in drawn(3, 9, (1, 2), 24, dtype)], {"use_qk_l2norm_in_kernel": True}
    kept["output_final_state"] = True
    wanted, final = kernels.standard_in_fixed_order(*inputs, **kept)
    packed = [each.flatten(0, 1)[None] for each in inputs]
    bounds = torch.tensor([0, 9, 18, 27], device=DEVICE)
    found, last = kernels.standard_in_fixed_order(*packed, **kept, cu_seqlens=bounds)
    assert torch.equal(found.view_as(wanted), wanted) and torch.equal(last, final)
    state, tokens = None, []
    for t in range(9):
        part = [each[2:, t : t + 1] for each in inputs]
        token, state = kernels.standard_in_fixed_order(*part, **kept, initial_state=state)
        tokens.append(token)
    assert torch.equal(torch.cat(tokens, dim=1), wanted[2:]) and torch.equal(state, final[2:])


@given(lengths=st.lists(st.integers(0, 150), min_size=1, max_size=6), chunk=st.sampled_from([32, 64]))
@settings(deadline=None, max_examples=50)
def test_chunks_have_each_token_once_and_none_of_two_sequences(lengths, chunk):
    bounds = list(pairwise((0, *accumulate(lengths))))
    most = most_chunks(1, sum(lengths), len(lengths), chunk)
    chunks, spans = tables(bounds, chunk, torch.device("cpu"), padded_to=most)
    assert len(chunks) == most and len(spans) == len(lengths)
    for (begin, end), (first, last) in zip(bounds, spans.tolist(), strict=True):
        tokens = [t for start, count in chunks[first:last].tolist() for t in range(start, start + count)]
        assert tokens == list(range(begin, end))
    assert not chunks[spans[-1, 1] :].any()


def test_chunks_of_a_batch():
    chunks, spans = tables_of_rows(2, 70, 64, torch.device("cpu"))
    assert chunks.tolist() == [[0, 64], [64, 6], [70, 64], [134, 6]] and spans.tolist() == [[0, 2], [2, 4]]
    assert len(chunks) == most_chunks(2, 70, None, 64)
    assert [len(each) for each in tables_of_rows(2, 0, 64, torch.device("cpu"))] == [0, 2]


@triton.jit
def _inverse_kernel(system, out, C: tl.constexpr):
    place_CC = tl.arange(0, C)[:, None] * C + tl.arange(0, C)[None, :]
    tl.store(out + place_CC, unit_lower_inverse(tl.load(system + place_CC), C, "tf32x3"))


@pytest.mark.parametrize("size", [16, 32, 64])
@pytest.mark.parametrize("kind", ["random", "equal keys"])
def test_the_inverse_of_a_chunk_s_system(size, kind):
    torch.manual_seed(0)
    whole = torch.rand(size, size) * 0.3 if kind == "random" else torch.full((size, size), 0.95)
    system = whole.tril(-1).to(DEVICE)
    found = torch.empty_like(system)
    _inverse_kernel[(1,)](system, found, C=size)
    wanted = torch.linalg.inv(torch.eye(size, dtype=torch.float64, device=DEVICE) + system.double())
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=2e-6)


@triton.jit
def _decays_kernel(g, since, to_end, pairwise, C: tl.constexpr):
    row_C = tl.arange(0, C)
    since_C, to_end_C, pairwise_CC = decays(tl.load(g + row_C), C)
    tl.store(since + row_C, since_C)
    tl.store(to_end + row_C, to_end_C)
    tl.store(pairwise + row_C[:, None] * C + row_C[None, :], pairwise_CC)


def test_small_decays_after_a_large_one_keep_their_digits():
    size = 32
    g = -torch.rand(size) * 1e-3
    g[7] = -3000.0
    found = [torch.empty(*shape, device=DEVICE) for shape in ((size,), (size,), (size, size))]
    _decays_kernel[(1,)](g.to(DEVICE), *found, C=size)
    sums = g.double().cumsum(0)
    between = (sums[:, None] - sums[None, :]).exp().tril()
    for mine, wanted in zip(found, (sums.exp(), (sums[-1] - sums).exp(), between), strict=True):
        torch.testing.assert_close(mine.cpu(), wanted.float(), rtol=3e-7, atol=0)


def test_projections_are_read_where_they_lie():
    joined = torch.randn(2, 12, 96, device=DEVICE)
    part = joined[..., 32:64].unflatten(-1, (2, 16))
    assert token_rows(part).data_ptr() == part.data_ptr()
    assert token_rows(
        part.transpose(1, 2).contiguous().transpose(1, 2)
    ).is_contiguous()  # rows of one head lie together
    assert token_rows(joined[:, ::2].unflatten(-1, (6, 16))).stride(1) == 192


@pytest.mark.parametrize("first, width, copied", [(0, 16, False), (4, 16, False), (1, 16, True), (1, 6, False)])
def test_tokens_that_vectors_could_not_load_are_copied(first, width, copied):
    tokens = torch.arange(2 * 5 * 3 * width + 8.0)[first:][: 2 * 5 * 3 * width].view(2, 5, 3, width)
    read = token_rows(tokens)
    assert torch.equal(read, tokens) and (read.data_ptr() != tokens.data_ptr()) == copied
    assert read.data_ptr() % 16 == 0 or width % 4


def test_autograd_keeps_the_inputs_and_two_tables():
    inputs = drawn()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        kernels.standard(*inputs, use_qk_l2norm_in_kernel=True)
    others = [x for x in kept if all(x.data_ptr() != each.data_ptr() for each in inputs)]
    assert len(others) == 2 and sum(x.nbytes for x in others) < 100


def test_gradients_of_the_final_states_alone():
    inputs = drawn()
    _, final = kernels.standard(*inputs, output_final_state=True, use_qk_l2norm_in_kernel=True)
    gradients = torch.autograd.grad(final.square().sum(), inputs, allow_unused=True)
    assert not gradients[0].any() and all(
        x.any() for x in gradients[1:]
    )  # no query reads the state after the last token


@pytest.mark.parametrize("packed", [False, True])
def test_compiles_without_a_graph_break(packed):
    inputs = drawn()
    options = {"use_qk_l2norm_in_kernel": True, "output_final_state": True}
    if packed:
        options["cu_seqlens"] = torch.tensor([0, 9, 40], device=DEVICE)

    def call(*inputs):
        return kernels.standard(*inputs, **options)

    wanted, found = call(*inputs), torch.compile(call, backend="aot_eager", fullgraph=True)(*inputs)
    weights = [torch.randn_like(x) for x in wanted]
    for mine, theirs in zip(
        (*found, *torch.autograd.grad(found, inputs, weights)),
        (*wanted, *torch.autograd.grad(wanted, inputs, weights)),
        strict=True,
    ):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda q, k, v, g, b: (q, k.half(), v, g, b), "query, key and value are .*float32, .*float16 and .*float32"),
        (lambda q, k, v, g, b: (q.double(), k.double(), v.double(), g, b), "give one of float32, bfloat16 and float16"),
    ],
)
def test_other_dtypes_are_refused(change, message):
    with pytest.raises(TypeError, match=message):
        kernels.standard(*change(*drawn(length=3)))


def test_wider_heads_are_refused():
    wide = drawn(length=3, width=MAX_HEAD_WIDTH + 1)
    with pytest.raises(ValueError, match="keys have 257 columns and values 257; the kernel takes at most 256"):
        kernels.standard(*wide)


@pytest.mark.parametrize(
    "sizes, reason",
    [
        ({"key_width": (128,), "value_width": (256,)}, ""),
        ({"key_width": (128,), "value_width": (512,)}, "takes heads of at most 256 columns, this site has 512"),
        ({}, ""),
    ],
)
def test_a_site_s_widths_are_asked_when_planning(sizes, reason):
    site = Site("m.0", "chunk_gated_delta_rule", "standard", "linear_attention", evidence="", sizes=sizes)
    assert chunk_gated_delta_rule(site) == reason
