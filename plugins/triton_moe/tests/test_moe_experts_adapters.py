"""What the contract can't ask of low-rank adapters beside the experts' weights: ranks, what is frozen, compilation.

Without a GPU they run in Triton's interpreter, in float32: its bf16 products are not products.
"""

from __future__ import annotations

import pytest
import torch

from veomni_ops import moe_experts as reference
from veomni_triton_moe import moe_experts
from veomni_triton_moe.moe_experts import backward

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def problem(rank, tokens=9, hidden=24, intermediate=16, experts=3, k=2, dtype=torch.float32):
    """Operands with frozen projections, and adapters of both as PEFT's memory has them: experts alternate in ``b``."""
    generator = torch.Generator().manual_seed(0)

    def values(*shape, scale=1.0):
        return (scale * torch.randn(*shape, generator=generator)).to(DEVICE, dtype)

    def adapter(rows, columns):
        a = values(experts * rank, columns, scale=columns**-0.5).view(experts, rank, columns)
        b = values(rows, rank, experts, scale=rank**-0.5).permute(2, 0, 1)
        return a.requires_grad_(), b.requires_grad_(), 0.75

    scores = torch.rand(tokens, experts, generator=generator)
    operands = (
        values(tokens, hidden).requires_grad_(),
        scores.topk(k).indices.to(DEVICE),
        values(tokens, k).requires_grad_(),
        values(experts, 2 * intermediate, hidden, scale=hidden**-0.5),
        values(experts, hidden, intermediate, scale=intermediate**-0.5),
    )
    return operands, {
        "gate_up_lora": adapter(2 * intermediate, hidden),
        "down_lora": adapter(hidden, intermediate),
    }


def leaves_of(operands, adapters):
    factors = (factor for a, b, _ in adapters.values() for factor in (a, b))
    return [tensor for tensor in (*operands, *factors) if tensor.requires_grad]


def with_gradients(kernel, operands, adapters):
    result = kernel(*operands, **adapters)
    return result, *torch.autograd.grad(result, leaves_of(operands, adapters), torch.ones_like(result))


def in_float64(tensor):
    exact = tensor.detach().double() if tensor.is_floating_point() else tensor
    return exact.requires_grad_(tensor.requires_grad)


def exact_with_gradients(operands, adapters):
    wide = {name: (in_float64(a), in_float64(b), scaling) for name, (a, b, scaling) in adapters.items()}
    return with_gradients(reference.standard, tuple(map(in_float64, operands)), wide)


def errors(found, exact):
    return [float((mine.double() - theirs).norm() / theirs.norm()) for mine, theirs in zip(found, exact, strict=True)]


@pytest.mark.parametrize("rank", [1, 16, 20, 70])
def test_any_rank_is_right(rank):
    operands, adapters = problem(rank)
    found = with_gradients(moe_experts.standard, operands, adapters)
    assert max(errors(found, exact_with_gradients(operands, adapters))) < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("rank, tokens", [(4, 4096), (16, 4096), (20, 4096), (96, 4096), (16, 256), (64, 256)])
def test_any_rank_is_right_at_a_models_shape(rank, tokens):
    """With tiles of 128 rows for 4096 tokens, and of 64 for 256."""
    operands, adapters = problem(rank, tokens, 2048, 768, 16, 4, dtype=torch.bfloat16)
    found = with_gradients(moe_experts.standard, operands, adapters)
    assert max(errors(found, exact_with_gradients(operands, adapters))) < 1e-2


@pytest.mark.gpu
def test_twenty_steps_give_the_same_bits():
    operands, adapters = problem(16, 4096, 2048, 768, 16, 4, dtype=torch.bfloat16)
    first = with_gradients(moe_experts.standard, operands, adapters)
    for _ in range(19):
        again = with_gradients(moe_experts.standard, operands, adapters)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(again, first, strict=True))


def test_recomputing_and_accumulating_give_the_same_bits():
    operands, adapters = problem(4)
    wanted = with_gradients(moe_experts.standard, operands, adapters)
    for kernel in (moe_experts.standard_recomputing, moe_experts.standard_accumulating):
        found = with_gradients(kernel, operands, adapters)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, wanted, strict=True))


@pytest.mark.parametrize("frozen", ["a", "b", "gate_up_lora", "down_lora"])
def test_a_frozen_factor_costs_no_product(frozen, monkeypatch):
    operands, adapters = problem(3)
    everything = with_gradients(moe_experts.standard, operands, adapters)
    of_everything = dict(zip(map(id, leaves_of(operands, adapters)), everything[1:], strict=True))
    for name, (a, b, _) in adapters.items():
        for letter, factor in (("a", a), ("b", b)):
            factor.requires_grad_(frozen not in (name, letter))
    sums = []
    computed = backward.factor_gradient
    monkeypatch.setattr(
        backward, "factor_gradient", lambda *args, **kwargs: sums.append(1) or computed(*args, **kwargs)
    )
    _, *found = with_gradients(moe_experts.standard, operands, adapters)
    assert len(sums) == 2
    for leaf, gradient in zip(leaves_of(operands, adapters), found, strict=True):
        assert torch.equal(gradient, of_everything[id(leaf)])


def test_frozen_projections_get_no_memory_either():
    operands, adapters = problem(2, hidden=64, intermediate=64, tokens=3)
    smaller = operands[4].numel() * 4
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        with_gradients(moe_experts.standard, operands, adapters)
    events = profile.profiler.kineto_results.events()
    if DEVICE == "cpu":
        assert 0 < max(event.nbytes() for event in events if event.name() == "[memory]") < smaller


def test_compiles_without_a_graph_break():
    torch._dynamo.reset()
    operands, adapters = problem(5)

    def call(*operands, **adapters):
        return moe_experts.standard(*operands, **adapters)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    found, wanted = (with_gradients(each, operands, adapters) for each in (compiled, moe_experts.standard))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, wanted, strict=True))


def test_adapters_of_another_dtype_are_refused_by_name():
    operands, adapters = problem(4)
    a, b, scaling = adapters["down_lora"]
    with pytest.raises(TypeError, match="fused_triton multiplies tensors of one dtype, but .*down_a"):
        moe_experts.standard(*operands, down_lora=(a.bfloat16(), b.bfloat16(), scaling))
