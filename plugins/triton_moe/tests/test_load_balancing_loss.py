"""The load-balancing kernel against its contract, and what the contract can't ask: ties, masks, launches, memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from veomni_conformance import check_kernel
from veomni_ops.contract import Size
from veomni_ops.load_balancing_loss import standard as reference
from veomni_triton_moe import load_balancing_loss as kernels
from veomni_triton_moe.plugin import veomni_kernels

SPECS = [spec for spec in veomni_kernels() if spec.op_name == "load_balancing_loss"]
CASES = [pytest.param(spec, dtype, id=f"{spec}-{dtype}") for spec in SPECS for dtype in spec.dtypes]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter runs one element after the other.
SAMPLES = {} if DEVICE == "cuda" else {"largest": Size.SMALL, "every_form": False}


@pytest.mark.parametrize("spec, dtype", CASES)
def test_conformance(spec, dtype):
    check_kernel(spec, DEVICE, dtype, **SAMPLES).raise_if_failed()


def _logits(layers, tokens, experts, dtype=torch.float32):
    return tuple(torch.randn(tokens, experts, device=DEVICE).to(dtype).requires_grad_() for _ in range(layers))


def _assert_near_reference(logits, top_k, mask=None):
    arguments = (logits, logits[0].shape[1], top_k, mask)
    found, wanted = kernels.standard(*arguments), reference(*arguments)
    torch.testing.assert_close(found, wanted)
    # A gradient is a difference of terms as large as experts / tokens, and nothing is left where all are chosen.
    tokens = len(logits) * (len(logits[0]) if mask is None else mask.sum().item())
    rounding = 2 * torch.finfo(torch.float32).eps * logits[0].shape[1] / tokens
    for mine, theirs in zip(torch.autograd.grad(found, logits), torch.autograd.grad(wanted, logits), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=rounding)


@given(
    layers=st.integers(1, 3),
    batch=st.integers(1, 3),
    positions=st.integers(1, 30),
    experts=st.integers(1, 40),
    top_k=st.integers(1, 8),
    masked=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(deadline=None, max_examples=25)
def test_any_shape(layers, batch, positions, experts, top_k, masked, seed):
    torch.manual_seed(seed)
    mask = torch.randint(2, (batch, positions), device=DEVICE) if masked else None
    if masked:
        mask[0, 0] = 1
    _assert_near_reference(_logits(layers, batch * positions, experts), min(top_k, experts), mask)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, torch.bfloat16])
def test_masks_of_any_dtype(dtype):
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 1]], device=DEVICE).to(dtype)
    _assert_near_reference(_logits(2, 8, 6), 2, mask)


def test_a_mask_may_weigh_tokens():
    _assert_near_reference(_logits(2, 8, 6), 2, torch.rand(2, 4, device=DEVICE))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_mask_that_keeps_nothing_gives_what_the_reference_gives():
    logits, mask = _logits(1, 4, 6), torch.zeros(1, 4, device=DEVICE)
    assert reference(logits, 6, 2, mask).isnan()
    assert kernels.standard(logits, 6, 2, mask).isnan()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("top_k", [1, 3, 6, 9])
def test_of_tied_experts_the_lowest_are_chosen(dtype, top_k):
    levels = torch.randint(3, (64, 9), device=DEVICE)
    chosen = levels.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    routes = torch.bincount(chosen.flatten(), minlength=9)
    logits = [(levels / 2).to(dtype)]
    _, slope = kernels.loss_and_slope(logits, top_k, None, kernels.sums_launch(logits))
    torch.testing.assert_close(slope * 64 * 64 / 9, routes.float())


def test_probabilities_that_rounding_makes_equal_are_ties():
    logits = torch.zeros(1, 4, device=DEVICE, dtype=torch.bfloat16)
    logits[0, 3] = 2.0**-12  # larger than the others, whose probability is the same in bfloat16
    _, slope = kernels.loss_and_slope([logits], 1, None, kernels.sums_launch([logits]))
    assert slope.tolist() == pytest.approx([4.0, 0.0, 0.0, 0.0])


def test_excluded_experts_and_large_logits():
    logits = torch.randn(20, 10, device=DEVICE) * 30 + 1e4
    logits[:, 7:] = float("-inf")
    _assert_near_reference((logits.requires_grad_(),), 2)


def test_the_default_dtype_changes_nothing():
    logits = _logits(2, 12, 5)
    wanted = kernels.standard(logits, 5, 2)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(kernels.standard(logits, 5, 2), wanted)
    finally:
        torch.set_default_dtype(torch.float32)


def test_logits_with_strides():
    wide, tall = torch.randn(20, 18, device=DEVICE), torch.randn(9, 20, device=DEVICE)
    _assert_near_reference((wide[:, ::2].requires_grad_(), tall.t().requires_grad_()), 3)


@pytest.mark.parametrize("launch", [kernels.Launch(1, 3), kernels.Launch(8, 2), kernels.Launch(32, 5, stages=2)])
def test_any_number_of_programs_and_tiles(launch):
    logits = [x.detach() for x in _logits(3, 37, 11)]
    loss, slope = kernels.loss_and_slope(logits, 2, None, launch)
    torch.testing.assert_close(loss, reference(tuple(logits), 11, 2))
    tiles = kernels.Launch(launch.tokens, -(-37 // launch.tokens))
    found = kernels.gradients(loss, slope, logits, None, tiles)
    wanted = kernels.gradients(loss, slope, logits, None, kernels.gradients_launch(logits))
    torch.testing.assert_close(found, wanted)


def test_only_layers_that_need_gradients_get_them():
    logits = _logits(3, 12, 5)
    wanted = torch.autograd.grad(kernels.standard(logits, 5, 2), logits)
    logits[1].requires_grad_(False)
    found = torch.autograd.grad(kernels.standard(logits, 5, 2), (logits[0], logits[2]))
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[2])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("masked", [False, True])
def test_compiles_without_a_graph_break(backend, masked):
    torch._dynamo.reset()
    logits = _logits(3, 12, 5)
    mask = torch.tensor([[1, 1, 1, 0]] * 3, device=DEVICE) if masked else None
    found = torch.compile(kernels.standard, backend=backend, fullgraph=True)(logits, 5, 2, mask)
    wanted = kernels.standard(logits, 5, 2, mask)
    assert torch.equal(found, wanted)
    for mine, theirs in zip(torch.autograd.grad(found, logits), torch.autograd.grad(wanted, logits), strict=True):
        assert torch.equal(mine, theirs)


def test_backward_twice_gives_the_same_gradients_twice():
    logits = _logits(2, 12, 5)
    loss = kernels.standard(logits, 5, 2)
    first = torch.autograd.grad(loss, logits, torch.full_like(loss, 3.0), retain_graph=True)
    second = torch.autograd.grad(loss, logits, torch.full_like(loss, 3.0))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_beside_the_logits_one_vector_is_saved():
    saved, logits = [], _logits(2, 12, 5)
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda _: None):
        kernels.standard(logits, 5, 2)
    ours = {x.data_ptr() for x in logits}
    assert [x.shape for x in saved if x.data_ptr() not in ours] == [(5,)]


def test_the_ops_keep_pytorchs_rules():
    logits = [x.detach() for x in _logits(2, 12, 5)]
    ops, mask = torch.ops.veomni_triton_moe, torch.ones(3, 4, device=DEVICE)
    torch.library.opcheck(ops.load_balancing_loss_forward.default, (logits, 2, mask))
    loss, slope = ops.load_balancing_loss_forward(logits, 2, mask)
    torch.library.opcheck(ops.load_balancing_loss_backward.default, (loss, slope, logits, mask))


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="every layer"):
        kernels.standard((*_logits(1, 4, 6), *_logits(1, 5, 6)), 6, 2)
    with pytest.raises(ValueError, match="every layer"):
        kernels.standard((*_logits(1, 4, 6), *_logits(1, 4, 6, torch.bfloat16)), 6, 2)
    with pytest.raises(ValueError, match="num_experts=8 and top_k=2"):
        kernels.standard(_logits(1, 4, 6), 8, 2)
    with pytest.raises(ValueError, match="num_experts=6 and top_k=7"):
        kernels.standard(_logits(1, 4, 6), 6, 7)
    with pytest.raises(ValueError, match="attention_mask has 3 elements"):
        kernels.standard(_logits(1, 4, 6), 6, 2, torch.ones(1, 3, device=DEVICE))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_twenty_runs_give_the_same_bits_and_none_waits_for_the_gpu(dtype):
    logits = _logits(5, 4099, 128, dtype)

    def run():
        loss = kernels.standard(logits, 128, 8)
        return loss, *torch.autograd.grad(loss, logits)

    first = run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        others = [run() for _ in range(19)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.gpu
def test_memory_beyond_the_gradients_is_small():
    logits = _logits(8, 16384, 128, torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kernels.standard(logits, 128, 8).backward()
    gradients = sum(x.numel() * x.element_size() for x in logits)
    assert torch.cuda.max_memory_allocated() - before <= gradients + 2**21


@pytest.mark.gpu
def test_under_autocast_probabilities_are_not_rounded_as_softmax_is_in_float32():
    logits = _logits(2, 300, 60, torch.bfloat16)
    wide = tuple(layer.detach().float().requires_grad_() for layer in logits)
    with torch.autocast("cuda", torch.bfloat16):
        found = kernels.standard(logits, 60, 4)
    wanted = reference(wide, 60, 4)
    torch.testing.assert_close(found, wanted)
    for mine, theirs in zip(torch.autograd.grad(found, logits), torch.autograd.grad(wanted, wide), strict=True):
        torch.testing.assert_close(mine, theirs.bfloat16())
