"""The opaque operators on a CPU, with plain PyTorch in the place of QuACK's calls: autograd, fakes and fullgraph."""

from __future__ import annotations

import plain_experts
import plain_loss
import pytest
import torch
from plain_quack import adapter

from veomni_ops import cross_entropy_loss, moe_experts
from veomni_quack.moe_experts import token_sums

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the other tests run the operators themselves")


@pytest.fixture
def experts(monkeypatch):
    operators, kernel = adapter("moe_experts.operators"), adapter("moe_experts.kernel")
    monkeypatch.setattr(operators, "grouped_gemm", plain_experts.PRODUCTS)
    # Sums aren't compiled for a CPU, which would take longer than all these tests.
    monkeypatch.setattr(token_sums, "_compiled_weighted_sum", token_sums._weighted_sum)
    monkeypatch.setattr(token_sums, "_compiled_plain_sum", token_sums._plain_sum)
    return kernel.standard


@pytest.fixture
def loss(monkeypatch):
    operators, kernel = adapter("cross_entropy_loss.operators"), adapter("cross_entropy_loss.kernel")
    monkeypatch.setattr(operators, "quack_calls", plain_loss.CALLS)
    return kernel.causal


def samples(contract, dtype=torch.bfloat16):
    return [sample for sample in contract.samples(torch.device("cpu"), dtype) if not sample.needs]


def run(call, sample):
    result = call(*sample.args, **sample.kwargs)
    leaves = [tensor for tensor in sample.args if isinstance(tensor, torch.Tensor) and tensor.requires_grad]
    return result.detach(), *torch.autograd.grad(result, leaves, torch.ones_like(result))


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("number", range(len(samples(moe_experts.CONTRACTS["standard"]))))
def test_experts_compile_to_the_same_bits(experts, number):
    sample = samples(moe_experts.CONTRACTS["standard"])[number]
    compared(experts, moe_experts.standard, sample, 4e-2)


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("number", range(len(samples(cross_entropy_loss.CONTRACTS["causal"]))))
def test_the_loss_compiles_to_the_same_bits(loss, number):
    sample = samples(cross_entropy_loss.CONTRACTS["causal"])[number]
    compared(loss, cross_entropy_loss.causal, sample, 8e-2)


def compared(kernel, reference, sample, tolerance):
    torch._dynamo.reset()
    found = run(kernel, sample)
    compiled = run(torch.compile(kernel, backend="aot_eager", fullgraph=True), sample)
    for mine, theirs in zip(found, compiled, strict=True):
        assert torch.equal(mine, theirs)
    for mine, theirs in zip(found, run(reference, sample), strict=True):
        assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
        assert (mine.double() - theirs.double()).norm() <= tolerance * theirs.double().norm()


def test_operators_agree_with_their_fakes(experts, loss):
    from torch.library import opcheck

    loss_forward = adapter("cross_entropy_loss.operators").forward
    experts_forward = adapter("moe_experts.operators").forward
    tests = ("test_schema", "test_faketensor")
    sample = samples(moe_experts.CONTRACTS["standard"])[0]
    opcheck(experts_forward, sample.args, test_utils=tests)
    hidden, weight, labels = samples(cross_entropy_loss.CONTRACTS["causal"])[0].args
    for wants in ((True, True), (False, True), (True, False), (False, False)):
        opcheck(loss_forward, (hidden, weight, labels, None, -100, None, None, *wants), test_utils=tests)


def test_float32_is_refused(experts, loss):
    for kernel, contract in (
        (experts, moe_experts.CONTRACTS["standard"]),
        (loss, cross_entropy_loss.CONTRACTS["causal"]),
    ):
        with pytest.raises(TypeError, match="all operands in bfloat16, or all in float16, but got float32"):
            kernel(*samples(contract, torch.float32)[0].args)


def test_a_switch_to_another_gpu_is_refused(monkeypatch):
    check_target = adapter("compiling").check_target
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    for switch, value, refused in (("QUACK_ARCH", "sm_90a", False), ("CUTE_DSL_ARCH", "sm_100a", True)):
        monkeypatch.setenv(switch, value)
        if not refused:
            check_target()
            continue
        with pytest.raises(RuntimeError, match=r"CUTE_DSL_ARCH=sm_100a .* compute capability 9\.0: unset"):
            check_target()


def test_the_first_call_is_announced_once(caplog):
    first_call = adapter("compiling").first_call
    with caplog.at_level("INFO"):
        for _ in range(2):
            with first_call("a product", torch.bfloat16, 64):
                pass
    before, after = (record.getMessage() for record in caplog.records)
    assert before.startswith("QuACK: first call of a product (torch.bfloat16, 64): compiling takes")
    assert after.startswith("QuACK: a product (torch.bfloat16, 64) ready after")
