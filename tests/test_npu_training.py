"""Tiny models train on the simulated NPU with its kernels, as they do on a CPU with their own code."""

from __future__ import annotations

import pytest
import torch

from models import assert_equal_steps, build, step, tokens
from veomni_core import OpsConfig, binding_of, build_foundation_model, discover
from veomni_core.errors import KernelUnavailableError
from veomni_core.jobs.jobfile import load_yaml

JOB = """
model:
  ops_implementation:
    attn_implementation: npu_fusion_attention
    cross_entropy_loss_implementation: npu
    rms_norm_implementation: npu
    swiglu_mlp_implementation: {swiglu}
    rotary_pos_emb_implementation: npu
    load_balancing_loss_implementation: eager
    moe_implementation: {moe}
"""
DENSE = {"swiglu": "npu", "moe": "eager"}
# Every MLP of Qwen3-MoE is a mixture of experts.
EXPERTS = {"swiglu": "eager", "moe": "fused_npu"}
# How many sites each kernel has in models of two layers: Qwen3 norms queries and keys too.
FAMILIES = {
    "llama": (DENSE, {"rms_norm": 5, "rotary_pos_emb": 2, "swiglu_mlp": 2}),
    "qwen3": (DENSE, {"rms_norm": 9, "rotary_pos_emb": 2, "swiglu_mlp": 2}),
    "qwen3_moe": (EXPERTS, {"rms_norm": 9, "rotary_pos_emb": 2, "moe_experts": 2}),
}
ONCE = {"attention": 1, "cross_entropy_loss": 1}


@pytest.fixture
def registry(npu):
    """The core and this plugin, whatever else is installed."""
    return discover({"VEOMNI_PLUGINS": "veomni-npu"})


@pytest.fixture
def job(tmp_path):
    def write(values):
        path = tmp_path / "job.yaml"
        path.write_text(JOB.format(**values))
        return load_yaml(path)

    return write


def on_npu(eager, ops, registry):
    """The model of ``eager``, with its weights, built on the NPU."""
    config = OpsConfig.from_dict(ops, registry)
    model = build_foundation_model(eager.config, ops_implementation=config, torch_dtype=eager.dtype, init_device="npu")
    model.load_state_dict(eager.state_dict())
    return model.train()


def npu_step(model):
    loss, gradients = step(model, tokens().to("npu"))
    assert {tensor.device.type for tensor in (loss, *gradients.values())} == {"npu"}
    return loss.cpu(), {name: gradient.cpu() for name, gradient in gradients.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_the_cpu(family, job, registry):
    values, sites = FAMILIES[family]
    eager = build(family)
    model = on_npu(eager, job(values), registry)
    bound = {op.op_name: sum(decision.bound for decision in op.sites) for op in binding_of(model).plan.ops}
    assert {op: count for op, count in bound.items() if count} == {**sites, **ONCE}
    assert_equal_steps(npu_step(model), step(eager))


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_as_near_to_the_exact_gradients_as_the_models_own_code(family, job, registry):
    eager = build(family, dtype=torch.bfloat16)
    exact = build(family, dtype=torch.float64, experts_implementation="eager")
    exact.load_state_dict(eager.state_dict())
    (loss, gradients), own, (exact_loss, wanted) = (
        npu_step(on_npu(eager, job(FAMILIES[family][0]), registry)),
        step(eager),
        step(exact),
    )
    torch.testing.assert_close(loss, exact_loss, rtol=2**-9, atol=0)
    # Both round as often; which way is chance, so that one of them is up to a quarter further off.
    assert distance(gradients, wanted) <= 1.25 * distance(own[1], wanted)


def distance(gradients, wanted):
    return torch.cat([(gradients[name].double() - exact).flatten() for name, exact in wanted.items()]).norm()


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_adamw_goes_the_same_way(family, checkpointing, job, registry):
    eager = build(family)
    model = on_npu(eager, job(FAMILIES[family][0]), registry)
    if checkpointing:
        model.gradient_checkpointing_enable()
    losses = [[], []]
    for trained, take_step, found in zip((model, eager), (npu_step, step), losses, strict=True):
        optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
        for _ in range(4):
            found.append(take_step(trained)[0].item())
            optimizer.step()
    assert losses[1][-1] < losses[1][0] - 0.5
    # AdamW's first steps are nearly the sign of each gradient, which makes much of differences in the last digit.
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=0)


def test_the_gpu_preset_is_refused_for_all_fields_at_once(registry):
    with pytest.raises(KernelUnavailableError) as raised:
        on_npu(build("qwen3_moe"), {"preset": "gpu"}, registry)
    refused = {line.partition(": ")[0]: line for line in str(raised.value).splitlines()}
    usable = {
        "attn_implementation": "eager, npu_fusion_attention.",
        "cross_entropy_loss_implementation": "eager, npu.",
        "load_balancing_loss_implementation": "eager.",
        "moe_implementation": "eager, fused_npu.",
        "rms_norm_implementation": "eager, npu.",
        "rotary_pos_emb_implementation": "eager, npu.",
        "swiglu_mlp_implementation": "eager, npu.",
    }
    assert refused.keys() == usable.keys()
    for field, values in usable.items():
        assert refused[field].endswith(f"Usable: {values}")


def test_a_gpu_kernel_asked_for_by_name_is_refused_with_its_reason(npu):
    registry = discover({"VEOMNI_PLUGINS": "veomni-npu,veomni-triton-moe"})
    with pytest.raises(KernelUnavailableError) as raised:
        on_npu(build("qwen3_moe"), {"preset": "auto", "moe_implementation": "fused_triton"}, registry)
    assert str(raised.value) == (
        "moe_implementation: fused_triton can't run here: needs device type cuda or rocm, this is npu (Ascend910B3). "
        "Usable: eager, fused_npu."
    )


def test_auto_takes_the_npu_kernels_and_lists_what_stays_eager(registry):
    model = on_npu(build("qwen3_moe"), {"preset": "auto"}, registry)
    receipt = binding_of(model).receipt.to_dict()
    ops = {op["op"]: op for op in receipt["ops"] if op["found"]}
    assert receipt["hardware"] == "npu (Ascend910B3)"
    assert {name: op["chosen"] for name, op in ops.items()} == {
        "attention": ["npu_fusion_attention"],
        "cross_entropy_loss": ["npu"],
        "load_balancing_loss": ["eager"],
        "moe_experts": ["fused_npu"],
        "rms_norm": ["npu"],
        "rotary_pos_emb": ["npu"],
    }
    assert [entry["reason"] for entry in ops["load_balancing_loss"]["eager"]] == ["no kernel for standard is installed"]
    assert not any(op["eager"] for name, op in ops.items() if name != "load_balancing_loss")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_npu_preset_is_that_job_for_every_model(family, job, registry):
    plans = [
        binding_of(on_npu(build(family), ops, registry)).plan for ops in (job(FAMILIES[family][0]), {"preset": "npu"})
    ]
    assert plans[0].sha256 == plans[1].sha256
