"""The rotary kernels against their contracts, against the references bit for bit, and in every layout."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from veomni_conformance import check_kernel
from veomni_ops import rotary_pos_emb as reference
from veomni_ops.contract import Size, as_tensors
from veomni_triton import rotary_pos_emb as kernels
from veomni_triton.plugin import veomni_kernels
from veomni_triton.rotary_pos_emb.form import Form
from veomni_triton.rotary_pos_emb.launch import Launch, rotate

SPECS = [spec for spec in veomni_kernels() if spec.op_name == "rotary_pos_emb"]
VARIANTS = [spec.variant for spec in SPECS]
PARTIAL = [variant for variant in VARIANTS if variant.endswith(("partial", "tail"))]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter runs one element after the other. There, one variant for each way through the kernel is checked
# in every dtype; the others differ from one of them in the angles that they pick or in a sign.
SAMPLES = {} if DEVICE == "cuda" else {"largest": Size.SMALL, "every_form": False}
EVERY_DTYPE = VARIANTS if DEVICE == "cuda" else ["partial", "deinterleaved", "single_tail"]
CASES = [
    pytest.param(spec, dtype, id=f"{spec}-{dtype}")
    for spec in SPECS
    for dtype in (spec.dtypes if spec.variant in EVERY_DTYPE else ["bfloat16"])
]


@pytest.mark.thorough(one_per=["dtype"])  # one Triton function computes all variants
@pytest.mark.parametrize("spec, dtype", CASES)
def test_conformance(spec, dtype):
    check_kernel(spec, DEVICE, dtype, **SAMPLES).raise_if_failed()


def _heads(batch, heads, positions, width, dtype=torch.float32):
    """Queries or keys as a projection leaves them: ``[B, H, S, D]``, a transposed view."""
    return torch.randn(batch, positions, heads, width, device=DEVICE).to(dtype).transpose(1, 2).requires_grad_()


def _angles(variant, batch, positions, width, dtype=torch.float32):
    """Not cosines and sines of anything, in the layout of ``variant``; ``width`` dimensions are rotated."""
    layout = reference.LAYOUTS[variant]
    return [layout.spread(torch.randn(batch, positions, width // 2, device=DEVICE)).to(dtype) for _ in range(2)]


def _rotated(variant):
    """The tensors that ``variant`` takes, out of queries and keys."""
    return slice(1 if variant.startswith("single") else 2)


def _with_gradients(function, heads, *arguments):
    """Values and gradients, for an upstream that two functions share."""
    results = as_tensors(function(*heads, *arguments))
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(result.shape, generator=generator).to(result) for result in results]
    return *results, *torch.autograd.grad(results, heads, upstream)


def _assert_same_bits(found, wanted):
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)


def _assert_equals_reference(variant, q, k, cos, sin, unsqueeze_dim=1):
    """Values and gradients, bit for bit."""
    heads = (q, k)[_rotated(variant)]
    found, wanted = (
        _with_gradients(getattr(module, variant), heads, cos, sin, unsqueeze_dim) for module in (kernels, reference)
    )
    _assert_same_bits(found, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_rounds_as_the_reference(variant, dtype):
    q, k = _heads(2, 5, 3, 80, dtype), _heads(2, 2, 3, 80, dtype)
    _assert_equals_reference(variant, q, k, *_angles(variant, 2, 3, 48 if variant in PARTIAL else 80, dtype))


@given(
    variant=st.sampled_from(VARIANTS),
    batch=st.integers(1, 2),
    heads=st.tuples(st.integers(1, 5), st.integers(1, 3)),
    positions=st.integers(1, 9),
    half=st.integers(1, 12),
    rest=st.integers(0, 5),
    shared=st.booleans(),
    unsqueeze_dim=st.sampled_from([1, 2]),
)
@settings(deadline=None, max_examples=60)
def test_any_shape(variant, batch, heads, positions, half, rest, shared, unsqueeze_dim):
    width = 2 * half + (rest if variant in PARTIAL else 0)
    q, k = (_heads(batch, count, positions, width) for count in heads)
    if unsqueeze_dim == 2:
        q, k = (x.detach().transpose(1, 2).requires_grad_() for x in (q, k))
    _assert_equals_reference(
        variant, q, k, *_angles(variant, 1 if shared else batch, positions, 2 * half), unsqueeze_dim
    )


def test_heads_cut_out_of_one_projection():
    projection = torch.randn(2, 3, 8 * 16, device=DEVICE)
    q = projection[..., : 4 * 16].view(2, 3, 4, 16).transpose(1, 2).requires_grad_()
    k = projection[..., 4 * 16 : 6 * 16].view(2, 3, 2, 16).transpose(1, 2).requires_grad_()
    _assert_equals_reference("full", q, k, *_angles("full", 2, 3, 16))


def test_rotated_dimensions_cut_out_of_wider_heads():
    """As multi-head latent attention has them: the end of each query head, and one key after the latent."""
    q = torch.randn(2, 3, 4, 24, device=DEVICE).transpose(1, 2)[..., 8:].detach().requires_grad_()
    k = torch.randn(2, 3, 48, device=DEVICE)[..., 32:].view(2, 1, 3, 16).requires_grad_()
    _assert_equals_reference("deinterleaved", q, k, *_angles("deinterleaved", 2, 3, 16))
    q_out, _ = kernels.deinterleaved(q, k, *_angles("deinterleaved", 2, 3, 16))
    assert q_out.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("variant", ["full", "deinterleaved", "pairwise"])
def test_strided_dimensions_and_angles(variant):
    q, k = (torch.randn(1, heads, 3, 32, device=DEVICE)[..., ::2].requires_grad_() for heads in (2, 1))
    cos, sin = (x.repeat_interleave(2, dim=-1)[..., ::2] for x in _angles(variant, 1, 3, 16))
    _assert_equals_reference(variant, q, k, cos, sin)


def test_the_memory_layout_is_kept():
    q, k = _heads(2, 4, 3, 16), torch.randn(2, 2, 3, 16, device=DEVICE)
    q_out, k_out = kernels.full(q, k, *_angles("full", 2, 3, 16))
    assert (q_out.stride(), k_out.stride()) == (q.stride(), k.stride())


@pytest.mark.parametrize("variant", VARIANTS)
def test_angles_of_a_wider_dtype_leave_the_results_theirs(variant):
    heads = (_heads(1, 2, 3, 8, torch.bfloat16), _heads(1, 1, 3, 8, torch.bfloat16))[_rotated(variant)]
    angles = _angles(variant, 1, 3, 8)
    found, wanted = (as_tensors(getattr(module, variant)(*heads, *angles)) for module in (kernels, reference))
    assert {each.dtype for each in found} == {torch.bfloat16}
    _assert_same_bits(found, wanted)


def test_an_expanded_upstream_gradient():
    q, k, angles = _heads(1, 2, 3, 8), _heads(1, 1, 3, 8), _angles("deinterleaved", 1, 3, 8)
    found, wanted = (
        torch.autograd.grad([x.sum() for x in module.deinterleaved(q, k, *angles)], (q, k))
        for module in (kernels, reference)
    )
    _assert_same_bits(found, wanted)


def test_a_result_that_is_not_used_gets_no_gradient():
    q, k = _heads(1, 2, 3, 8), _heads(1, 1, 3, 8)
    q_out, _ = kernels.full(q, k, *_angles("full", 1, 3, 8))
    dq, dk = torch.autograd.grad(q_out.sum(), (q, k))
    assert dq.abs().sum() > 0
    assert not dk.any()


@pytest.mark.parametrize("launch", [Launch(1, 1), Launch(2, 4), Launch(8, 8)])
def test_the_launch_decides_no_bit(launch):
    q, k, angles = _heads(2, 3, 5, 8), _heads(2, 1, 5, 8), _angles("half_width", 2, 5, 8)
    _assert_same_bits(rotate(q, k, *angles, 1, Form(), launch), reference.half_width(q, k, *angles))


@pytest.mark.thorough(one_per=["variant"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(("variant", "unsqueeze_dim"), [*((each, 1) for each in VARIANTS), ("full", 2)])
def test_compiles_without_a_graph_break(variant, unsqueeze_dim, backend):
    torch._dynamo.reset()
    heads = (_heads(1, 3, 3, 8), _heads(1, 3, 3, 8))[_rotated(variant)]
    arguments = (*_angles(variant, 1, 3, 8), unsqueeze_dim)
    kernel = getattr(kernels, variant)
    compiled = torch.compile(kernel, backend=backend, fullgraph=True)
    _assert_same_bits(_with_gradients(compiled, heads, *arguments), _with_gradients(kernel, heads, *arguments))


@pytest.mark.parametrize("variant", ["full", "deinterleaved", "single_tail"])
def test_backward_twice_gives_the_same_gradients_twice(variant):
    heads = (_heads(1, 2, 3, 8), _heads(1, 1, 3, 8))[_rotated(variant)]
    results = as_tensors(getattr(kernels, variant)(*heads, *_angles(variant, 1, 3, 8)))
    upstream = [torch.full_like(result, 3.0) for result in results]
    first = torch.autograd.grad(results, heads, upstream, retain_graph=True)
    _assert_same_bits(first, torch.autograd.grad(results, heads, upstream))


@pytest.mark.parametrize("variant", VARIANTS)
def test_only_the_angles_are_saved(variant):
    saved = []
    heads, angles = (_heads(1, 2, 3, 8), _heads(1, 1, 3, 8))[_rotated(variant)], _angles(variant, 1, 3, 8)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor.data_ptr()), lambda _: None):
        getattr(kernels, variant)(*heads, *angles)
    assert saved == [x.data_ptr() for x in angles]


@pytest.mark.parametrize("form", [Form(), Form(reads_neighbours=True), Form(True, True, True, True)])
@pytest.mark.parametrize("key_heads", [1, 0])
def test_the_op_keeps_pytorchs_rules(form, key_heads):
    heads = (_heads(1, 2, 3, 8).detach(), _heads(1, key_heads, 3, 8).detach())
    arguments = (*heads, *_angles("half_width", 1, 3, 8), 1, *form)
    torch.library.opcheck(torch.ops.veomni_triton.rotary_pos_emb.default, arguments)


def test_what_cannot_be_rotated_is_refused():
    q, k = _heads(1, 2, 3, 8), _heads(1, 1, 3, 8)
    with pytest.raises(ValueError, match="cos is for 4 of a head's 8 dimensions"):
        kernels.full(q, k, *_angles("full", 1, 3, 4))
    with pytest.raises(ValueError, match="cos is for 12 dimensions, but a head has 8"):
        kernels.partial(q, k, *_angles("partial", 1, 3, 12))
    with pytest.raises(ValueError, match="cos is for 2 sequences, but q has 1"):
        kernels.full(q, k, *_angles("full", 2, 3, 8))
    with pytest.raises(ValueError, match="unsqueeze_dim is 0"):
        kernels.partial(q, k, *_angles("partial", 1, 3, 8), unsqueeze_dim=0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_twenty_runs_give_the_same_bits_and_none_waits_for_the_gpu(dtype):
    q, k = _heads(2, 32, 777, 128, dtype), _heads(2, 8, 777, 128, dtype)
    angles = _angles("full", 2, 777, 128, dtype)
    upstream = [torch.randn_like(x) for x in (q, k)]

    def run():
        results = kernels.full(q, k, *angles)
        return *results, *torch.autograd.grad(results, (q, k), upstream)

    first = run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        others = [run() for _ in range(19)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
