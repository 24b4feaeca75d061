"""A folder in the Hub's layout becomes kernels that are chosen once they passed, and never silently."""

from __future__ import annotations

import json

import pytest
import torch
from hub_folders import FUNCTION, LAYER, WRONG_GRADIENT, write_package
from verified_kernels import CPU, verified

from veomni_conformance.cli import verify as command
from veomni_conformance.cli.verify_processes import FAILED, Row
from veomni_core import OpsConfig, Plan, Site, apply_plan, bind, make_plan, plan_sites
from veomni_core.errors import ConfigError, KernelLoadError, KernelUnavailableError

NORM = Site("rms_norm", "layers.0.norm", "norm modules", "standard", "proven", "float32")
HUB = {"preset": "eager", "rms_norm_implementation": "acme"}


def planned(registry, value="acme", hardware=CPU):
    return plan_sites(
        [NORM], {"preset": "eager", "rms_norm_implementation": value}, registry=registry, hardware=hardware
    )


@pytest.fixture(scope="module")
def model():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**shape, vocab_size=64))


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize(
    "kernel",
    [LAYER, FUNCTION, {**LAYER, "call": {**LAYER["call"], "scale": {"value": 1.0}}}],
    ids=["layer", "function", "constant"],
)
def test_a_right_kernel_is_chosen_once_it_has_passed(right, listed, model, kernel):
    registry = listed(right, kernel)
    with pytest.raises(
        KernelUnavailableError,
        match=r"acme has not passed veomni verify in float32 here.*veomni-hub --kernel rms_norm/standard:acme checks",
    ):
        bind(model, HUB, registry=registry)
    assert verified(registry) == []
    ids = torch.tensor([[5, 9, 17, 3]])
    model.zero_grad()
    eager = model(ids, labels=ids).loss
    eager.backward()
    gradient = model.model.norm.weight.grad.clone()
    model.zero_grad()
    with bind(model, HUB, registry=registry) as binding:
        assert {decision.kernel for op in binding.plan.ops if op.op_name == "rms_norm" for decision in op.sites} == {
            "acme"
        }
        loss = model(ids, labels=ids).loss
        loss.backward()
    torch.testing.assert_close(loss, eager)
    torch.testing.assert_close(model.model.norm.weight.grad, gradient)


def test_a_wrong_gradient_is_named_and_the_kernel_stays_unchosen(tmp_path, listed):
    write_package(tmp_path / "acme-norm", WRONG_GRADIENT)
    registry = listed(tmp_path / "acme-norm", LAYER)
    assert any("the gradient of x is off" in failure for failure in verified(registry))
    with pytest.raises(KernelUnavailableError, match=r"acme failed veomni verify in float32.*gradient of x is off"):
        planned(registry)
    assert not planned(registry, ["acme", "eager"]).kernels


def test_a_failure_takes_a_pass_back(right, listed):
    registry = listed(right, LAYER)
    verified(registry)
    record = registry.plugin("veomni-hub")
    command.keep_results([Row("rms_norm/standard:acme", "float32", FAILED, ("off",))], record, CPU)
    with pytest.raises(KernelUnavailableError, match="failed veomni verify"):
        planned(registry)


def test_a_pass_counts_for_the_dtype_the_code_and_the_call_that_passed(right, listed):
    first = listed(right, LAYER)
    verified(first)
    assert [str(kernel.spec) for kernel in planned(first).kernels] == ["rms_norm/standard:acme"]
    with pytest.raises(KernelUnavailableError, match="has not passed veomni verify in bfloat16"):
        half = Site("rms_norm", "layers.0.norm", "norm modules", "standard", "proven", "bfloat16")
        plan_sites([half], OpsConfig.from_dict(HUB, first), hardware=CPU)
    with pytest.raises(KernelUnavailableError, match="has not passed"):
        planned(listed(right, FUNCTION))
    (right / "build" / "torch-universal" / "notes.txt").write_text("a new release")
    with pytest.raises(KernelUnavailableError, match="has not passed"):
        planned(listed(right, LAYER))


def test_the_plan_tells_one_code_from_another(right, listed):
    before = listed(right, LAYER)
    verified(before)
    old = planned(before)
    (right / "build" / "torch-universal" / "notes.txt").write_text("a new release")
    after = listed(right, LAYER)
    verified(after)
    new = planned(after)
    assert old.sha256 != new.sha256 and "0.1.0+" in old.diff(new)[0]
    assert Plan.from_json(old.to_json()) == old
    with pytest.raises(KernelLoadError, match="no kernel that VEOMNI_HUB_KERNELS lists now has the digest"):
        old.kernels[0].spec.load()


def test_auto_takes_it_only_if_the_file_prefers_it_and_says_why_not_yet(right, listed):
    assert planned(listed(right, LAYER), "auto").passed_by == ()
    registry = listed(right, {**LAYER, "preference": 90})
    waiting = planned(registry, "auto")
    assert not waiting.kernels and "has not passed veomni verify" in waiting.passed_by[0]
    verified(registry)
    assert [kernel.spec.name for kernel in planned(registry, "auto").kernels] == ["acme"]


@pytest.mark.thorough
def test_a_plan_for_other_hardware_assumes_the_check_and_can_not_be_applied_without_it(right, listed, model):
    registry = listed(right, LAYER)
    assert "rms_norm/standard:acme: has passed veomni verify" in planned(registry, hardware="h200").assumptions
    plan = make_plan(model, HUB, registry=registry, hardware="cpu")
    with pytest.raises(KernelUnavailableError, match="has not passed veomni verify in float32 here"):
        apply_plan(model, plan, registry)
    with apply_plan(model, plan, registry, verify=True) as binding:
        assert binding.active
    verified(registry)
    apply_plan(model, plan, registry).undo()


@pytest.mark.parametrize("text", ["{", "[1]", '[{"kernel": 1}]'])
def test_a_damaged_memory_refuses(right, listed, text, tmp_path, caplog):
    registry = listed(right, LAYER)
    verified(registry)
    planned(registry)
    (tmp_path / "cache" / "checked_kernels.json").write_text(text)
    with pytest.raises(KernelUnavailableError, match="has not passed"):
        planned(registry)
    assert "checked_kernels.json can't be read" in caplog.text


def test_an_unknown_op_or_variant_leaves_that_kernel_out_alone(right, listed):
    unknown = [{**LAYER, "op": "rms_nrm"}, {**LAYER, "variant": "ofset"}]
    record = listed(right, LAYER, *unknown).plugin("veomni-hub")
    assert [str(spec) for spec in record.kernels] == ["rms_norm/standard:acme"]
    reasons = " ".join(map(str, record.skipped))
    assert "Did you mean 'rms_norm'?" in reasons and "Did you mean 'offset'?" in reasons


@pytest.mark.thorough
def test_the_receipt_names_the_layer_its_folder_and_its_digest(right, listed, model):
    registry = listed(right, LAYER)
    verified(registry)
    with bind(model, HUB, registry=registry) as binding:
        (kernel,) = binding.plan.kernels
        assert kernel.spec.description == f"AcmeRMSNorm of {right}"
        assert kernel.version == f"0.1.0+{kernel.spec.digest[:16]}"
        assert kernel.version in json.dumps(binding.receipt.to_dict())


ATTENTION = {
    "op": "attention",
    "variant": "standard",
    "function": "attention",
    "features": ["dense_mask", "sdpa_mask", "wide_heads", "odd_heads"],
    "call": {name: name for name in ("module", "query", "key", "value", "attention_mask", "scaling", "is_causal")},
}
CODE = """
from veomni_ops import attention as op


def attention(module, query, key, value, attention_mask, scaling, is_causal):
    if attention_mask is not None and attention_mask.dim() == 2:
        raise ValueError("a padding mask is not computed")
    return op.standard(module, query, key, value, attention_mask, scaling, is_causal=is_causal)
"""


@pytest.mark.thorough
def test_an_attention_under_its_repository_s_name(tmp_path, listed, model):
    build = write_package(tmp_path / "acme-attention")
    (build / "__init__.py").write_text(CODE)
    registry = listed(tmp_path / "acme-attention", ATTENTION, name="acme/attention")
    config = {"preset": "eager", "attn_implementation": "acme/attention"}
    with pytest.raises(KernelUnavailableError, match="acme/attention has not passed veomni verify"):
        bind(model, config, registry=registry)
    assert verified(registry) == []
    ids = torch.tensor([[5, 9, 17, 3]])
    eager = model(ids, labels=ids).loss
    with bind(model, config, registry=registry) as binding:
        assert [kernel.spec.name for kernel in binding.plan.kernels] == ["acme/attention"]
        torch.testing.assert_close(model(ids, labels=ids).loss, eager)
    more = {**ATTENTION, "features": [*ATTENTION["features"], "padding_mask"]}
    with pytest.raises(KernelUnavailableError, match="acme/attention has not passed veomni verify"):
        bind(model, config, registry=listed(tmp_path / "acme-attention", more, name="acme/attention"))
    registry = listed(tmp_path / "acme-attention", ATTENTION, name="acme/attention")
    kernel = registry.resolve("attention", "standard", "acme/attention").load()
    heads = torch.zeros(1, 4, 3, 8)
    with pytest.raises(ConfigError, match="attention is not given softcap, and this call has it"):
        kernel(model.model.layers[0].self_attn, heads, heads, heads, None, softcap=30.0)
