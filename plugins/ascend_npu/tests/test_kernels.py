"""Every kernel against its contract, and what the contracts can't ask."""

from __future__ import annotations

import pytest
import torch

from veomni_conformance import check_kernel
from veomni_npu import cross_entropy_loss, moe_experts, rms_norm, rms_norm_gated, rotary_pos_emb, swiglu_mlp
from veomni_npu.plugin import veomni_kernels
from veomni_ops.contract import Size

CASES = [pytest.param(spec, dtype, id=f"{spec}-{dtype}") for spec in veomni_kernels() for dtype in spec.dtypes]


@pytest.mark.thorough(one_per=["npu", "spec"])
@pytest.mark.parametrize("spec, dtype", CASES)
def test_conformance(npu, spec, dtype, extent):
    check_kernel(spec, npu, dtype, **{"largest": Size.BEYOND_A_TILE, **extent}).raise_if_failed()


def _leaf(device, *shape):
    return torch.randn(*shape).to(device).requires_grad_()


CALLS = {
    "rms_norm": (lambda x, w: rms_norm.standard(x, w, 1e-6), [(5, 16), (16,)]),
    "rms_norm offset": (lambda x, w: rms_norm.offset(x, w, 1e-6), [(5, 16), (16,)]),
    "rms_norm_gated": (lambda x, g, w: rms_norm_gated.sigmoid(x, g, w, 1e-6), [(5, 16), (5, 16), (16,)]),
    "rms_norm_gated gate_first": (
        lambda x, g, w: rms_norm_gated.gate_first(x, g, w, 1e-6, group_size=8),
        [(5, 16), (5, 16), (16,)],
    ),
    "swiglu_mlp": (swiglu_mlp.standard, [(5, 16), (5, 16)]),
    "rotary_pos_emb": (
        lambda q, k: torch.cat(rotary_pos_emb.full(q, k, *torch.ones(2, 2, 5, 16, device=q.device)), dim=1),
        [(2, 4, 5, 16), (2, 2, 5, 16)],
    ),
    "cross_entropy_loss": (
        lambda h, w: cross_entropy_loss.causal(h, w, torch.arange(300, device=h.device).clamp(max=10)),
        [(300, 8), (11, 8)],
    ),
    "moe_experts": (
        lambda h, w, u, d: moe_experts.standard(h, torch.arange(14, device=h.device).clamp(max=4).view(7, 2), w, u, d),
        [(7, 8), (7, 2), (4, 12, 8), (4, 8, 6)],
    ),
}


@pytest.mark.parametrize("function, shapes", CALLS.values(), ids=CALLS)
def test_compiles_without_a_graph_break(npu, function, shapes):
    torch._dynamo.reset()
    arguments = [_leaf(npu, *shape) for shape in shapes]
    found, wanted = torch.compile(function, backend="aot_eager", fullgraph=True)(*arguments), function(*arguments)
    torch.testing.assert_close(found.cpu(), wanted.cpu())
    upstream = torch.randn(wanted.shape).to(npu)
    gradients = (torch.autograd.grad(result, arguments, upstream) for result in (found, wanted))
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine.cpu(), theirs.cpu())


def test_a_rotation_keeps_only_cos_and_sin(npu):
    q, k, angles = _leaf(npu, 2, 4, 5, 16), _leaf(npu, 2, 2, 5, 16), torch.randn(2, 5, 16).to(npu)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        rotary_pos_emb.full(q, k, angles.cos(), angles.sin())
    assert set(kept) == {(2, 1, 5, 16)}


@pytest.mark.parametrize("variant", ["standard", "sigmoid", "gate_first"])
def test_a_gated_norm_keeps_its_inputs_and_a_number_for_each_group(npu, variant):
    x, gate, weight = (_leaf(npu, *shape).to(torch.bfloat16) for shape in ((5, 16), (5, 16), (16,)))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append((t.shape, t.dtype)) or t, lambda t: t):
        getattr(rms_norm_gated, variant)(x, gate, weight, 1e-6, group_size=8)
    assert kept == [*((t.shape, t.dtype) for t in (x, gate, weight)), ((5, 2, 1), torch.float32)]


def test_frozen_experts_get_no_gradient_and_the_router_still_does(npu):
    hidden, weights = _leaf(npu, 6, 8), _leaf(npu, 6, 2)
    gate_up, down = (torch.randn(*shape).to(npu) for shape in ((3, 8, 8), (3, 8, 4)))
    index = (torch.arange(12).view(6, 2) % 3).to(npu)
    frozen = moe_experts.standard(hidden, index, weights, gate_up, down)
    trained = moe_experts.standard(hidden, index, weights, gate_up.requires_grad_(), down.requires_grad_())
    for mine, theirs in zip(
        torch.autograd.grad(frozen.sum(), (hidden, weights)),
        torch.autograd.grad(trained.sum(), (hidden, weights)),
        strict=True,
    ):
        assert torch.equal(mine, theirs)


def test_a_loss_that_is_only_evaluated_multiplies_by_the_weight_once(npu, monkeypatch):
    hidden, weight, labels = _leaf(npu, 300, 8), _leaf(npu, 11, 8), (torch.arange(300) % 11).to(npu)
    monkeypatch.setattr(cross_entropy_loss, "CHUNK_BYTES", 0)
    products = []

    class Count(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function in (torch.nn.functional.linear, torch.Tensor.matmul, torch.Tensor.__matmul__):
                products.append(function)
            return function(*args, **(kwargs or {}))

    with Count(), torch.no_grad():
        evaluated = cross_entropy_loss.causal(hidden, weight, labels)
    assert len(products) == 3  # 300 tokens in chunks of 128
    with Count():
        trained = cross_entropy_loss.causal(hidden, weight, labels)
    assert len(products) == 3 + 9
    assert torch.equal(evaluated, trained.detach())
