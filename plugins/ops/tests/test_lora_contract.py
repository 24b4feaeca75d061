"""The feature ``lora`` of moe_experts: what adapters mean, and kernels with faults in them."""

from __future__ import annotations

import pytest
import torch
from planted_faults import assert_caught, failures_of

from veomni_ops import moe_experts

VARIANTS = ("standard", "clamped")


def _adapted_samples(variant):
    samples = moe_experts.CONTRACTS[variant].samples(torch.device("cpu"), torch.float64)
    return [sample for sample in samples if sample.needs == ("lora",)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_adapters_are_what_is_added_to_the_weights(variant):
    reference = moe_experts.CONTRACTS[variant].reference
    samples = _adapted_samples(variant)
    assert len(samples) == 9
    for sample in samples:
        merged = list(sample.args)
        for place, name in ((3, "gate_up_lora"), (4, "down_lora")):
            if name in sample.kwargs:
                a, b, scaling = sample.kwargs[name]
                merged[place] = merged[place] + scaling * torch.einsum("eor,eri->eoi", b, a)
        torch.testing.assert_close(reference(*sample.args, **sample.kwargs), reference(*merged))


def _scaled(adapter, factor):
    return None if adapter is None else (adapter[0], adapter[1], adapter[2] * factor)


def right(*args, **kwargs):
    return moe_experts.standard(*args, **kwargs)


def scaling_forgotten(*args, gate_up_lora=None, down_lora=None):
    adapters = [each and (*each[:2], 1.0) for each in (gate_up_lora, down_lora)]
    return moe_experts.standard(*args, *adapters)


def of_the_next_expert(*args, gate_up_lora=None, down_lora=None):
    adapters = [each and (each[0].roll(1, 0), *each[1:]) for each in (gate_up_lora, down_lora)]
    return moe_experts.standard(*args, *adapters)


def of_down_ignored(*args, gate_up_lora=None, down_lora=None):
    return moe_experts.standard(*args, gate_up_lora)


def first_rank_alone(*args, gate_up_lora=None, down_lora=None):
    adapters = [each and (each[0][:, :1], each[1][:, :, :1], each[2]) for each in (gate_up_lora, down_lora)]
    return moe_experts.standard(*args, *adapters)


def b_as_pefts_memory_has_it(*args, gate_up_lora=None, down_lora=None):
    """It takes ``b`` expert by expert out of memory in which the experts alternate."""

    def misread(adapter):
        a, b, scaling = adapter
        memory = b.permute(1, 2, 0).reshape(b.shape[1], -1)
        return a, memory.view(b.shape[1], b.shape[0], b.shape[2]).transpose(0, 1), scaling

    adapters = [each and misread(each) for each in (gate_up_lora, down_lora)]
    return moe_experts.standard(*args, *adapters)


def no_gradient_of_a(*args, gate_up_lora=None, down_lora=None):
    adapters = [each and (each[0].detach(), *each[1:]) for each in (gate_up_lora, down_lora)]
    return moe_experts.standard(*args, *adapters)


def scaling_missing_in_the_gradient(*args, gate_up_lora=None, down_lora=None):
    def spoilt(adapter):
        a, b, scaling = adapter
        unscaled = a.detach() + (a - a.detach()) / scaling
        return unscaled, b, scaling

    adapters = [each and spoilt(each) for each in (gate_up_lora, down_lora)]
    return moe_experts.standard(*args, *adapters)


def ignores_adapters(*args, gate_up_lora=None, down_lora=None):
    return moe_experts.standard(*args)


FAULTS = {
    scaling_forgotten: "adapters of odd ranks",
    of_the_next_expert: "adapters of odd ranks",
    of_down_ignored: "an adapter of down alone",
    first_rank_alone: "adapters of odd ranks",
    b_as_pefts_memory_has_it: "adapters of odd ranks",
    no_gradient_of_a: "lora[0]",
    scaling_missing_in_the_gradient: "lora[0]",
}


def test_the_right_kernel_passes():
    assert failures_of(right, op="moe_experts", features=("lora",)) == ()


@pytest.mark.thorough(one_per=["kernel"])
@pytest.mark.parametrize("kernel", FAULTS, ids=lambda kernel: kernel.__name__)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_planted_fault_is_caught(kernel, dtype):
    assert_caught(kernel, FAULTS[kernel], op="moe_experts", features=("lora",), dtype=dtype)


def test_a_kernel_that_ignores_adapters_without_a_word_is_caught():
    assert_caught(ignores_adapters, "adapters of odd ranks", op="moe_experts")
