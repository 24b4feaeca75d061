"""A folder in the Hub's layout becomes kernels that are chosen once they passed, and never silently."""

from __future__ import annotations

import json
import os
import py_compile

import pytest
import torch
from hub_folders import FUNCTION, LAYER, RIGHT, WRONG_GRADIENT, write_package

from veomni_core import Hardware, OpsConfig, Plan, Site, apply_plan, bind, make_plan, plan_sites
from veomni_core.cli import verify as command
from veomni_core.cli.verify_processes import FAILED, OK, Row
from veomni_core.errors import KernelLoadError, KernelUnavailableError
from veomni_core.testing import check_kernel

CPU = Hardware.cpu()
NORM = Site("rms_norm", "layers.0.norm", "norm modules", "standard", "proven", "float32")
HUB = {"preset": "eager", "rms_norm_implementation": "acme"}


def verified(registry, *, dtype="float32"):
    """What ``veomni verify veomni-hub --dtype float32`` does, in this process; the failures."""
    record = registry.plugin("veomni-hub")
    reports = {str(spec): check_kernel(spec, "cpu", dtype) for spec in record.kernels}
    rows = [
        Row(name, dtype, OK if report.ok else FAILED, tuple(report.failures), cases={"odd": (0.5, 0.1)})
        for name, report in reports.items()
    ]
    command.keep_results(rows, record, CPU)
    return [failure for report in reports.values() for failure in report.failures]


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


@pytest.fixture
def right(tmp_path):
    write_package(tmp_path / "acme-norm")
    return tmp_path / "acme-norm"


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
    (tmp_path / "cache" / "certificates.json").write_text(text)
    with pytest.raises(KernelUnavailableError, match="has not passed"):
        planned(registry)
    assert "certificates.json can't be read" in caplog.text


def test_a_changed_byte_is_refused_before_anything_is_imported(right, listed, tmp_path):
    registry = listed(right, LAYER)
    verified(registry)
    (spec,) = registry.kernels("rms_norm")
    code = right / "build" / "torch-universal" / "layers.py"
    code.write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\n" + code.read_text())
    with pytest.raises(
        KernelLoadError, match=r"the files of torch-universal .* are not those that were listed: sha256:"
    ):
        spec.load()
    assert not (tmp_path / "imported").exists()


def test_bytecode_that_no_digest_covers_does_not_run(right, listed):
    registry = listed(right, LAYER)
    code = right / "build" / "torch-universal" / "layers.py"
    good, stat = code.read_text(), code.stat()
    code.write_text(good.replace(RIGHT, "0 * x.float() + eps" + " " * (len(RIGHT) - 19)))
    os.utime(code, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    py_compile.compile(str(code))
    code.write_text(good)
    os.utime(code, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    (spec,) = registry.kernels("rms_norm")
    assert check_kernel(spec, "cpu", "float32").ok


def test_a_folder_that_is_a_link_is_refused(right, listed, tmp_path):
    registry = listed(right, LAYER)
    (tmp_path / "elsewhere").mkdir()
    (right / "build" / "torch-universal" / "more").symlink_to(tmp_path / "elsewhere")
    (spec,) = registry.kernels("rms_norm")
    with pytest.raises(KernelLoadError, match="is a link to a folder"):
        spec.load()


def test_no_variant_for_this_machine_says_what_is_there_and_what_is_needed(tmp_path, listed):
    write_package(tmp_path / "acme-norm", variant="torch29-cxx11-cu128-x86_64-linux")
    (spec,) = listed(tmp_path / "acme-norm", LAYER).kernels("rms_norm")
    with pytest.raises(
        KernelLoadError,
        match=r"is for this machine \(torch29-cxx11-cu128-x86_64-linux: Torch version \(2.9\) does not match",
    ):
        spec.load()


def test_a_listed_variant_that_is_not_there_is_named_with_those_that_are(right, listed):
    registry = listed(right, LAYER)
    (right / "build" / "torch-universal").rename(right / "build" / "torch-cuda")
    (spec,) = registry.kernels("rms_norm")
    with pytest.raises(
        KernelLoadError, match="has no build/torch-universal, which this machine needs; it has torch-cuda"
    ):
        spec.load()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"name": "A"}, "is not the metadata of a kernel"),
        ({"id": None}, "is not the metadata of a kernel"),
        ({"python-depends": ["einops-of-tomorrow"]}, "einops-of-tomorrow"),
        ({"kernel-depends": [{"repo-id": "acme/other", "version": 1}]}, "loads other kernels of the Hub"),
        ({"id": "torch"}, "a module of that name is loaded already"),
    ],
    ids=["name", "id", "python-depends", "kernel-depends", "taken-id"],
)
def test_metadata_that_can_not_be_met_is_named(tmp_path, listed, change, message):
    write_package(tmp_path / "acme-norm", **change)
    (spec,) = listed(tmp_path / "acme-norm", LAYER).kernels("rms_norm")
    with pytest.raises(KernelLoadError, match=message):
        spec.load()


def test_metadata_that_is_missing_or_no_json_is_named(right, listed):
    path = right / "build" / "torch-universal" / "metadata.json"
    for broken in (lambda: path.write_text("{"), path.unlink):
        broken()
        (spec,) = listed(right, LAYER).kernels("rms_norm")
        with pytest.raises(KernelLoadError, match="metadata.json is not the metadata of a kernel"):
            spec.load()


@pytest.mark.parametrize(
    "kernel, message",
    [
        ({**LAYER, "layer": "AcmeRmsNorm"}, "has no layer 'AcmeRmsNorm'. Did you mean 'AcmeRMSNorm'?"),
        ({**LAYER, "layer": "AcmeInferenceNorm"}, "says has_backward = False"),
        ({**FUNCTION, "function": "rmsnorm"}, "has no function 'rmsnorm'. Did you mean 'rms_norm'?"),
        (
            {**FUNCTION, "call": {"x": "hidden", "weight": "weight", "eps": "eps"}},
            "'hidden', which the op doesn't have",
        ),
        ({**FUNCTION, "call": {"x": "x", "weight": "weight"}}, "call leaves out eps of the op"),
        ({**FUNCTION, "call": {"x": "x", "w": "weight", "eps": "eps"}}, "rms_norm can't be called with x, w, eps"),
    ],
    ids=["layer", "backward", "function", "argument", "left-out", "parameter"],
)
def test_a_mapping_that_does_not_fit_is_named(right, listed, kernel, message):
    (spec,) = listed(right, kernel).kernels("rms_norm")
    with pytest.raises(KernelLoadError) as error:
        spec.load()
    assert message in str(error.value)


def test_a_layer_without_a_backward_can_evaluate(right, listed):
    (spec,) = listed(right, {**LAYER, "layer": "AcmeInferenceNorm", "backward": False}).kernels("rms_norm")
    assert check_kernel(spec, "cpu", "float32").ok


@pytest.mark.parametrize("kernel", [LAYER, FUNCTION], ids=["layer", "function"])
def test_the_call_breaks_no_graph(right, listed, kernel):
    (spec,) = listed(right, kernel).kernels("rms_norm")
    norm, x, weight = spec.load(), torch.randn(4, 32), torch.randn(32)
    compiled = torch.compile(lambda x, weight: norm(x, weight, eps=1e-6), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, weight), norm(x, weight, 1e-6))


def test_a_call_with_other_arguments_raises(right, listed):
    (spec,) = listed(right, FUNCTION).kernels("rms_norm")
    with pytest.raises(TypeError, match="takes x, weight, eps, not 1 values and bias"):
        spec.load()(torch.ones(2), bias=None)


def test_an_unknown_op_or_variant_leaves_that_kernel_out_alone(right, listed):
    unknown = [{**LAYER, "op": "rms_nrm"}, {**LAYER, "variant": "ofset"}]
    record = listed(right, LAYER, *unknown).plugin("veomni-hub")
    assert [str(spec) for spec in record.kernels] == ["rms_norm/standard:acme"]
    reasons = " ".join(map(str, record.skipped))
    assert "Did you mean 'rms_norm'?" in reasons and "Did you mean 'offset'?" in reasons


def test_the_receipt_names_the_layer_its_folder_and_its_digest(right, listed, model):
    registry = listed(right, LAYER)
    verified(registry)
    with bind(model, HUB, registry=registry) as binding:
        (kernel,) = binding.plan.kernels
        assert kernel.spec.description == f"AcmeRMSNorm of {right}"
        assert kernel.version == f"0.1.0+{kernel.spec.digest[:16]}"
        assert kernel.version in json.dumps(binding.receipt.to_dict())
