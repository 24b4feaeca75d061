"""The rotary kernel against its contract, against the reference bit for bit, and in every layout."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from veomni_core.ops import rotary_pos_emb as reference
from veomni_core.ops.contract import Size
from veomni_core.testing import check_kernel
from veomni_triton_moe import rotary_pos_emb as kernels
from veomni_triton_moe.plugin import veomni_kernels

SPECS = [spec for spec in veomni_kernels() if spec.op_name == "rotary_pos_emb"]
CASES = [pytest.param(spec, dtype, id=f"{spec}-{dtype}") for spec in SPECS for dtype in spec.dtypes]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter runs one element after the other.
SAMPLES = {} if DEVICE == "cuda" else {"largest": Size.SMALL, "every_form": False}


@pytest.mark.parametrize("spec, dtype", CASES)
def test_conformance(spec, dtype):
    check_kernel(spec, DEVICE, dtype, **SAMPLES).raise_if_failed()


def _heads(batch, heads, positions, width, dtype=torch.float32):
    """Queries or keys as a projection leaves them: ``[B, H, S, D]``, a transposed view."""
    return torch.randn(batch, positions, heads, width, device=DEVICE).to(dtype).transpose(1, 2).requires_grad_()


def _angles(batch, positions, width, dtype=torch.float32):
    """Not cosines and sines of anything, so that the two halves differ."""
    return [torch.randn(batch, positions, width, device=DEVICE).to(dtype) for _ in range(2)]


def _assert_equals_reference(variant, q, k, cos, sin, unsqueeze_dim=1):
    """Values and gradients, bit for bit."""
    found = getattr(kernels, variant)(q, k, cos, sin, unsqueeze_dim)
    wanted = getattr(reference, variant)(q, k, cos, sin, unsqueeze_dim)
    upstream = [torch.randn_like(result) for result in wanted]
    found = (*found, *torch.autograd.grad(found, (q, k), upstream))
    wanted = (*wanted, *torch.autograd.grad(wanted, (q, k), upstream))
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant, width, rotary_width", [("full", 64, 64), ("partial", 80, 48), ("partial", 32, 32)])
def test_rounds_as_the_reference(variant, width, rotary_width, dtype):
    q, k = _heads(2, 5, 3, width, dtype), _heads(2, 2, 3, width, dtype)
    _assert_equals_reference(variant, q, k, *_angles(2, 3, rotary_width, dtype))


@given(
    batch=st.integers(1, 2),
    heads=st.tuples(st.integers(1, 5), st.integers(1, 3)),
    positions=st.integers(1, 9),
    half=st.integers(1, 12),
    rest=st.integers(0, 5),
    shared=st.booleans(),
    unsqueeze_dim=st.sampled_from([1, 2]),
)
@settings(deadline=None, max_examples=25)
def test_any_shape(batch, heads, positions, half, rest, shared, unsqueeze_dim):
    q, k = (_heads(batch, count, positions, 2 * half + rest) for count in heads)
    if unsqueeze_dim == 2:
        q, k = (x.detach().transpose(1, 2).requires_grad_() for x in (q, k))
    cos, sin = _angles(1 if shared else batch, positions, 2 * half)
    _assert_equals_reference("partial", q, k, cos, sin, unsqueeze_dim)


def test_heads_cut_out_of_one_projection():
    projection = torch.randn(2, 3, 8 * 16, device=DEVICE)
    q = projection[..., : 4 * 16].view(2, 3, 4, 16).transpose(1, 2).requires_grad_()
    k = projection[..., 4 * 16 : 6 * 16].view(2, 3, 2, 16).transpose(1, 2).requires_grad_()
    _assert_equals_reference("full", q, k, *_angles(2, 3, 16))


def test_strided_dimensions_and_angles():
    q, k = (torch.randn(1, heads, 3, 32, device=DEVICE)[..., ::2].requires_grad_() for heads in (2, 1))
    cos, sin = (angles[..., ::2] for angles in _angles(1, 3, 32))
    _assert_equals_reference("full", q, k, cos, sin)


def test_the_memory_layout_is_kept():
    q, k = _heads(2, 4, 3, 16), torch.randn(2, 2, 3, 16, device=DEVICE)
    q_out, k_out = kernels.full(q, k, *_angles(2, 3, 16))
    assert (q_out.stride(), k_out.stride()) == (q.stride(), k.stride())


def test_angles_of_a_wider_dtype_leave_the_results_theirs():
    q, k = _heads(1, 2, 3, 8, torch.bfloat16), _heads(1, 1, 3, 8, torch.bfloat16)
    angles = _angles(1, 3, 8)
    for mine, theirs in zip(kernels.full(q, k, *angles), reference.full(q, k, *angles), strict=True):
        assert mine.dtype == torch.bfloat16
        assert torch.equal(mine, theirs)


def test_an_expanded_upstream_gradient():
    q, k, angles = _heads(1, 2, 3, 8), _heads(1, 1, 3, 8), _angles(1, 3, 8)
    found, wanted = (
        torch.autograd.grad([x.sum() for x in function(q, k, *angles)], (q, k))
        for function in (kernels.full, reference.full)
    )
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_a_result_that_is_not_used_gets_no_gradient():
    q, k = _heads(1, 2, 3, 8), _heads(1, 1, 3, 8)
    q_out, _ = kernels.full(q, k, *_angles(1, 3, 8))
    dq, dk = torch.autograd.grad(q_out.sum(), (q, k))
    assert dq.abs().sum() > 0
    assert not dk.any()


@pytest.mark.parametrize("launch", [kernels.Launch(1, 1), kernels.Launch(2, 4), kernels.Launch(8, 8)])
def test_the_launch_decides_no_bit(launch):
    q, k, angles = _heads(2, 3, 5, 8), _heads(2, 1, 5, 8), _angles(2, 5, 8)
    for mine, theirs in zip(
        kernels.rotate(q, k, *angles, 1, False, launch), reference.full(q, k, *angles), strict=True
    ):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
def test_compiles_without_a_graph_break(backend, unsqueeze_dim):
    torch._dynamo.reset()
    q, k = _heads(1, 3, 3, 8), _heads(1, 3, 3, 8)
    arguments = (q, k, *_angles(1, 3, 8), unsqueeze_dim)
    found = torch.compile(kernels.full, backend=backend, fullgraph=True)(*arguments)
    wanted = kernels.full(*arguments)
    upstream = [torch.randn_like(result) for result in wanted]
    found = (*found, *torch.autograd.grad(found, (q, k), upstream))
    wanted = (*wanted, *torch.autograd.grad(wanted, (q, k), upstream))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_backward_twice_gives_the_same_gradients_twice():
    q, k = _heads(1, 2, 3, 8), _heads(1, 1, 3, 8)
    results = kernels.full(q, k, *_angles(1, 3, 8))
    upstream = [torch.full_like(result, 3.0) for result in results]
    first = torch.autograd.grad(results, (q, k), upstream, retain_graph=True)
    second = torch.autograd.grad(results, (q, k), upstream)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_only_the_angles_are_saved():
    saved = []
    q, k, angles = _heads(1, 2, 3, 8), _heads(1, 1, 3, 8), _angles(1, 3, 8)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor.data_ptr()), lambda _: None):
        kernels.full(q, k, *angles)
    assert saved == [x.data_ptr() for x in angles]


def test_the_op_keeps_pytorchs_rules():
    heads = (_heads(1, 2, 3, 8).detach(), _heads(1, 1, 3, 8).detach())
    arguments = (*heads, *_angles(1, 3, 8), 1, False)
    torch.library.opcheck(torch.ops.veomni_triton_moe.rotary_pos_emb.default, arguments)


def test_what_cannot_be_rotated_is_refused():
    q, k = _heads(1, 2, 3, 8), _heads(1, 1, 3, 8)
    with pytest.raises(ValueError, match="cos is 4 wide, expected 8"):
        kernels.full(q, k, *_angles(1, 3, 4))
    with pytest.raises(ValueError, match="unsqueeze_dim is 0"):
        kernels.partial(q, k, *_angles(1, 3, 8), unsqueeze_dim=0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_twenty_runs_give_the_same_bits_and_none_waits_for_the_gpu(dtype):
    q, k = _heads(2, 32, 777, 128, dtype), _heads(2, 8, 777, 128, dtype)
    angles = _angles(2, 777, 128, dtype)
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
