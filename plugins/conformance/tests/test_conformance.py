"""The conformance check catches every way in which a kernel can be wrong, and names it."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.autograd import Function

from veomni_conformance import check_kernel
from veomni_core import KernelSpec
from veomni_core.errors import ConformanceError, ContractError, KernelLoadError, SpecError
from veomni_core.kernels import first_derivatives_only
from veomni_ops import cross_entropy_loss, load_balancing_loss, moe_experts, rms_norm, rotary_pos_emb, swiglu_mlp
from veomni_ops.contract import Size

_calls = itertools.count()


class _DamagesUpstream(Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return torch.nn.functional.silu(gate) * up

    @staticmethod
    def backward(ctx, upstream):
        gate, up = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
        with torch.enable_grad():
            result = swiglu_mlp.standard(gate, up)
        gradients = torch.autograd.grad(result, (gate, up), upstream.clone())
        upstream.mul_(2)
        return gradients


class _DamagesInput(Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate.clone(), up.clone())
        result = swiglu_mlp.standard(gate, up)
        gate.data.zero_()
        return result

    @staticmethod
    def backward(ctx, upstream):
        gate, up = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
        with torch.enable_grad():
            result = swiglu_mlp.standard(gate, up)
        return torch.autograd.grad(result, (gate, up), upstream)


def wrong_sign(q, k, cos, sin, unsqueeze_dim=1):
    return rotary_pos_emb.full(q, k, cos, -sin, unsqueeze_dim)


def rounds_too_early(x, weight, eps):
    """What a kernel of OLMo 2's norm does when it is written as Llama's."""
    return rms_norm.standard(x, weight, eps)


def forgets_eps(x, weight, eps):
    return rms_norm.standard(x, weight, 0.0)


def no_router_gradient(hidden, index, weights, gate_up, down):
    return moe_experts.standard(hidden, index, weights.detach(), gate_up, down)


def drops_repeated_routes(hidden, index, weights, gate_up, down):
    first = torch.stack([(index[:, :k] != index[:, k : k + 1]).all(1) for k in range(index.shape[1])], dim=1)
    return moe_experts.standard(hidden, index, weights * first, gate_up, down)


def clamps_indices(hidden, index, weights, gate_up, down):
    return moe_experts.standard(hidden, index.clamp_max(gate_up.shape[0] - 1), weights, gate_up, down)


def is_a_little_too_large(hidden, index, weights, gate_up, down):
    """By half of what one element may be off, and more than twice what all may on average."""
    return moe_experts.standard(hidden, index, weights, gate_up, down) * (1 + 5e-6)


def misses_one_element(hidden, index, weights, gate_up, down):
    result = moe_experts.standard(hidden, index, weights, gate_up, down)
    error = torch.zeros_like(result)
    error.view(-1)[:1] = 6e-5 * result.detach().square().mean().sqrt()
    return result + error


def swaps_gate_and_up(hidden, index, weights, gate_up, down):
    return moe_experts.standard(hidden, index, weights, torch.cat(gate_up.chunk(2, dim=1)[::-1], dim=1), down)


def divides_by_all_tokens(hidden, weight, labels, bias=None, ignore_index=-100, **options):
    loss = cross_entropy_loss.causal(hidden, weight, labels, bias, ignore_index, **options)
    return loss * (labels != ignore_index).sum() / len(labels)


def nan_without_labels(hidden, weight, labels, *args, **options):
    return cross_entropy_loss.causal(hidden, weight, labels, *args, **options) / ((labels != -100).any().float())


def softcap_is_lost(hidden, weight, labels, *args, softcap=None, **options):
    return cross_entropy_loss.causal(hidden, weight, labels, *args, **options)


def ignores_the_mask(gate_logits, num_experts, top_k=2, attention_mask=None):
    return load_balancing_loss.standard(gate_logits, num_experts, top_k)


def damages_input(gate, up):
    return _DamagesInput.apply(gate, up)


def damages_incoming_gradient(gate, up):
    return _DamagesUpstream.apply(gate, up)


def aliases_its_input(gate, up):
    with torch.no_grad():
        value = swiglu_mlp.standard(gate, up)
    return up.data.copy_(value).requires_grad_() if up.is_contiguous() else up.detach().requires_grad_()


def differs_from_run_to_run(gate, up):
    return swiglu_mlp.standard(gate, up) * (1 + 2e-7 * (next(_calls) % 2))


def gives_float32(gate, up):
    return swiglu_mlp.standard(gate.float(), up.float())


def gives_another_shape(gate, up):
    return swiglu_mlp.standard(gate, up).flatten()


def gives_nan(gate, up):
    return swiglu_mlp.standard(gate, up) + (gate.abs() > 1e9).float() / 0.0 * 0.0


def has_no_gradient(gate, up):
    return swiglu_mlp.standard(gate, up).detach()


def has_no_gradient_of_repeated_rows(gate, up):
    return swiglu_mlp.standard(gate.detach() if 0 in gate.stride() else gate, up)


def wants_rows(gate, up):
    if not gate.numel():
        raise RuntimeError("grid must not be empty")
    return swiglu_mlp.standard(gate, up)


def reads_strides_wrongly(gate, up):
    return swiglu_mlp.standard(gate.as_strided(gate.shape, torch.empty(gate.shape).stride()), up)


FAULTS = [
    (wrong_sign, "rotary_pos_emb", "full", "float32", r"result 0 is off"),
    (rounds_too_early, "rms_norm", "cast_after", "bfloat16", r"rounded elsewhere than the reference: \d+% of elements"),
    (forgets_eps, "rms_norm", "standard", "float32", r"sample 'eps dominates': the result is off"),
    (no_router_gradient, "moe_experts", "standard", "float32", r"the gradient of top_k_weights is missing"),
    (drops_repeated_routes, "moe_experts", "standard", "float32", r"sample 'an expert twice in a row': the result"),
    (
        clamps_indices,
        "moe_experts",
        "standard",
        "float32",
        r"sample 'every index dropped': the result is .* exactly zero",
    ),
    (is_a_little_too_large, "moe_experts", "standard", "float32", r"sample 'odd sizes': the result is off: norm error"),
    (misses_one_element, "moe_experts", "standard", "float32", r"sample 'odd sizes': the result is off: element error"),
    (swaps_gate_and_up, "moe_experts", "standard", "bfloat16", r"the result is off"),
    (divides_by_all_tokens, "cross_entropy_loss", "causal", "float32", r"sample 'odd sizes': the result is off"),
    (
        nan_without_labels,
        "cross_entropy_loss",
        "causal",
        "float32",
        r"sample 'no label counts': the result is not finite",
    ),
    (softcap_is_lost, "cross_entropy_loss", "causal", "float32", r"sample 'softcap and scale': the result is off"),
    (ignores_the_mask, "load_balancing_loss", "standard", "float32", r"sample 'a mask': the result is off"),
    (damages_input, "swiglu_mlp", "standard", "float32", r"wrote into its input gate"),
    (damages_incoming_gradient, "swiglu_mlp", "standard", "float32", r"wrote into the incoming gradient"),
    (aliases_its_input, "swiglu_mlp", "standard", "float32", r"shares memory with its input up"),
    (differs_from_run_to_run, "swiglu_mlp", "standard", "float32", r"promises determinism, but two runs"),
    (gives_float32, "swiglu_mlp", "standard", "bfloat16", r"gives dtype float32, expected bfloat16"),
    (gives_another_shape, "swiglu_mlp", "standard", "float32", r"gives shape \(\d+,\), expected"),
    (gives_nan, "swiglu_mlp", "standard", "float32", r"the result is not finite"),
    (has_no_gradient, "swiglu_mlp", "standard", "float32", r"the gradient of gate is missing"),
    (has_no_gradient_of_repeated_rows, "swiglu_mlp", "standard", "float32", r"the gradient of gate is missing"),
    (wants_rows, "swiglu_mlp", "standard", "float32", r"raised RuntimeError: grid must not be empty"),
    (reads_strides_wrongly, "swiglu_mlp", "standard", "float32", r"the result is off"),
]


def spec(kernel, op, variant, **options):
    return KernelSpec(kernel.__name__, op, variant, f"{__name__}:{kernel.__name__}", **options)


@pytest.mark.parametrize("kernel, op, variant, dtype, message", FAULTS, ids=[fault[0].__name__ for fault in FAULTS])
def test_a_planted_fault_is_caught_and_named(kernel, op, variant, dtype, message):
    report = check_kernel(spec(kernel, op, variant), "cpu", dtype, largest=Size.SMALL)
    assert not report.ok
    with pytest.raises(ConformanceError, match=message) as caught:
        report.raise_if_failed()
    assert f"{op}/{variant}:{kernel.__name__} on cpu in {dtype} breaks its contract" in str(caught.value)


def test_what_a_kernel_does_not_promise_is_not_asked_of_it():
    for kernel, promise in (
        (differs_from_run_to_run, {"deterministic": False}),
        (has_no_gradient, {"backward": False}),
    ):
        check_kernel(spec(kernel, "swiglu_mlp", "standard", **promise)).raise_if_failed()


def narrow(site):
    return "takes heads of at most 128" if max(site.sizes["head_dim"]) > 128 else ""


def test_what_planning_refuses_must_be_refused_and_a_feature_that_is_declared_must_be_computed():
    # It passes over sinks, chosen keys and packing, and over a window that no mask holds.
    ignores = KernelSpec(
        name="ignores",
        op_name="attention",
        variant="standard",
        factory="transformers.integrations.sdpa_attention:sdpa_attention_forward",
        deterministic=False,
        features=("dense_mask", "sliding_window"),
        can_run=f"{__name__}:narrow",
    )
    failed = {case.sample: case.failures for case in check_kernel(ignores).cases if case.failures}
    assert failed["sinks"] == ("does not declare sinks, but computes something instead of raising",)
    assert failed["chosen keys"] == ("does not declare chosen_keys, but computes something instead of raising",)
    assert failed["packed sequences"] == ("does not declare packed, but computes something instead of raising",)
    assert failed["heads of 256"] == ("takes heads of at most 128, but computes something instead of raising",)
    assert failed["sliding window"][0].startswith("the result is off")
    assert "boolean mask" not in failed


class _Saves(Function):
    """A backward like a kernel's: its gradients come from detached copies."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return swiglu_mlp.standard(gate, up)

    @staticmethod
    def backward(ctx, upstream):
        gate, up = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
        with torch.enable_grad():
            result = swiglu_mlp.standard(gate, up)
        return torch.autograd.grad(result, (gate, up), upstream.detach())


class _SavesAndSaysSo(_Saves):
    backward = staticmethod(first_derivatives_only(_Saves.backward))


def without_second_derivatives(gate, up):
    return _Saves.apply(gate, up)


def refusing_second_derivatives(gate, up):
    return _SavesAndSaysSo.apply(gate, up)


def plain_operations(gate, up):
    return torch.nn.functional.silu(gate) * up


def test_second_derivatives_are_right_or_refused():
    def cases(kernel):
        report = check_kernel(spec(kernel, "swiglu_mlp", "standard"))
        return {
            case.sample: case.failures for case in report.cases if case.sample.startswith("second") or case.failures
        }

    (failure,) = cases(without_second_derivatives)["second derivatives"]
    assert failure.startswith("they are off, and nothing was raised: norm error")
    assert cases(refusing_second_derivatives) == {"second derivatives (refused)": ()}
    assert cases(plain_operations) == {"second derivatives": ()}


def test_what_cannot_be_checked_is_an_error():
    with pytest.raises(SpecError, match="does not declare float64"):
        check_kernel(spec(wants_rows, "swiglu_mlp", "standard"), "cpu", "float64")
    with pytest.raises(ContractError, match="op 'softmax' is not one of the core's"):
        check_kernel(spec(wants_rows, "softmax", "standard"))
    with pytest.raises(ContractError, match="has no contract for 'sigmoid'"):
        check_kernel(spec(wants_rows, "swiglu_mlp", "sigmoid"))
    with pytest.raises(KernelLoadError, match="no_such_library"):
        check_kernel(KernelSpec("gone", "swiglu_mlp", "standard", "no_such_library:kernel"))


def test_a_report_says_how_close_each_sample_came():
    report = check_kernel(KernelSpec("reference", "swiglu_mlp", "standard", "veomni_ops.swiglu_mlp:standard"))
    assert report.ok
    assert 0 < max(case.worst_value for case in report.cases) <= 1
    assert report.to_dict()["cases"][0]["sample"] == report.cases[0].sample
