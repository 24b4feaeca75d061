"""A model that is not where its kernels run: what it is planned for, and what is said of it."""

from __future__ import annotations

import copy

import pytest
import torch

from models import build, step
from planned_norms import registry as registry_of
from veomni_core import Hardware, HardwareRequirement, KernelSpec, bind, build_foundation_model, make_plan
from veomni_core.errors import BindingError, ConfigError, HostError
from veomni_core.planning.config import OpsConfig
from veomni_ops.rms_norm import standard

AUTO = {"preset": "auto"}
GPU = KernelSpec("gpu", "rms_norm", "standard", f"{__name__}:gpu_norm", hardware=HardwareRequirement("cuda"))
REGISTRY = registry_of(GPU)
fails = True


def gpu_norm(x, weight, eps):
    """As Triton does with tensors of the CPU; or as if they were on a GPU."""
    if fails and not torch.compiler.is_compiling():
        raise ValueError("Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)")
    return standard(x, weight, eps)


@pytest.fixture(autouse=True)
def a_gpu_is_here(monkeypatch):
    here = Hardware("cuda", 90, "NVIDIA H200", detected=True)
    monkeypatch.setattr(Hardware, "detect", classmethod(lambda kind: here))
    monkeypatch.setitem(globals(), "fails", True)


def hooks(model):
    return [hook for module in model.modules() for hook in module._forward_hooks.values()]


def test_the_models_device_decides(caplog):
    model = build("llama")
    binding = bind(model, AUTO, registry=REGISTRY)
    assert binding.plan.hardware == Hardware.cpu() and not binding.receipt.misplaced and not hooks(model)
    step(model)
    assert make_plan(build("llama"), AUTO, registry=REGISTRY).sha256 == binding.plan.sha256
    assert not caplog.records  # no kernel was bound, so none was passed over either


def test_kernels_of_the_cpu_beside_an_idle_gpu_are_a_warning_unless_the_job_says_so(caplog):
    config = {"preset": "eager", "swiglu_mlp_implementation": "torch"}
    bind(build("llama"), config, device="cpu")
    assert not caplog.records
    bind(build("llama"), config)
    (record,) = caplog.records
    message = record.getMessage()
    assert "kernels of the CPU, and this machine has cuda 9.0 (NVIDIA H200)" in message and "device='cuda'" in message


def test_a_model_that_is_partly_on_meta_is_on_its_way_to_the_machines_device():
    model = build("llama")
    model.lm_head.to("meta")
    assert make_plan(model, AUTO, registry=REGISTRY).hardware.device_type == "cuda"


def test_a_model_that_was_moved_after_it_was_bound_on_the_cpu_says_what_it_missed(npu):
    model = build("llama")
    binding = bind(model, {"preset": "eager", "swiglu_mlp_implementation": "torch"}, device="cpu")
    model.to(npu)
    assert binding.receipt.misplaced.startswith("the plan is for the CPU, and the model's parameters are on npu now")
    assert "Not on its device: the plan is for the CPU" in binding.receipt.table()


def test_a_model_that_will_be_moved_is_planned_for_the_gpu_and_the_receipt_says_where_it_must_go():
    model = build("llama")
    binding = bind(model, AUTO, registry=REGISTRY, device="cuda")
    assert binding.plan.hardware.device_type == "cuda"
    said = (
        "rms_norm/standard:gpu at model.layers.0.input_layernorm and 4 more runs on cuda, and the model's parameters "
        "are on cpu. Move the model to cuda, or plan for where it is: bind(..., device='cpu')"
    )
    assert binding.receipt.to_dict()["misplaced"] == said
    assert "Not on its device: rms_norm/standard:gpu" in binding.receipt.table()


def test_a_forward_that_fails_there_says_why_on_the_model_and_on_its_copy():
    model = build("llama")
    bind(model, AUTO, registry=REGISTRY, device="cuda")
    for each in (model, copy.deepcopy(model), model.model):
        with pytest.raises(ValueError, match="cpu tensor") as caught:
            each(input_ids=torch.ones(1, 3, dtype=torch.long))
        (note,) = caught.value.__notes__
        assert note.startswith("rms_norm/standard:gpu at model.layers.0.input_layernorm") and "device='cpu'" in note


def test_nothing_of_it_is_left_after_a_forward_that_succeeds_nor_after_undo(monkeypatch):
    model = build("llama")
    with bind(model, AUTO, registry=REGISTRY, device="cuda"):
        assert len(hooks(model)) == 3
    assert not hooks(model)
    bind(model, AUTO, registry=REGISTRY, device="cuda")
    monkeypatch.setitem(globals(), "fails", False)
    step(model)
    assert not hooks(model) and not model._forward_hooks_always_called


def test_a_whole_graph_has_nothing_of_it():
    model, ids = build("llama"), torch.ones(1, 3, dtype=torch.long)
    wanted = model(input_ids=ids).logits
    bind(model, AUTO, registry=REGISTRY, device="cuda")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(input_ids=ids, use_cache=False).logits, wanted)


def test_another_error_gets_no_note_where_the_model_is_in_its_place(monkeypatch):
    model = build("llama")
    bind(model, AUTO, registry=REGISTRY, device="cuda")
    monkeypatch.setattr(
        "veomni_core.binding.placement.torch_device_type", lambda kind: "cpu"
    )  # as if it had been moved
    with pytest.raises(ValueError, match="cpu tensor") as caught:
        step(model)
    assert not hasattr(caught.value, "__notes__")


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_who_stays_on_the_cpu_says_so_and_gets_a_plan_for_it(device):
    model = build("llama")
    binding = bind(model, AUTO, registry=REGISTRY, device=device)
    assert binding.plan.hardware == Hardware.cpu() and not binding.receipt.misplaced and not hooks(model)
    step(model)


def test_a_model_without_weights_is_nowhere_yet_and_is_planned_for_the_machine():
    with torch.device("meta"):
        model = build("llama")
    binding = bind(model, AUTO, registry=REGISTRY)
    assert not binding.receipt.misplaced and binding.plan.hardware.device_type == "cuda"


def test_a_built_model_may_say_so_too():
    ops = OpsConfig.from_dict(AUTO, REGISTRY)
    for device, bound in (("cuda", True), (None, False), ("cpu", False)):
        model = build_foundation_model(build("llama").config, ops_implementation=ops, init_device="cpu", device=device)
        assert bool(hooks(model)) is bound


def test_verifying_in_the_wrong_place_is_refused():
    with pytest.raises(BindingError, match="verify=True runs the kernels where the model is, but rms_norm/standard"):
        bind(build("llama"), AUTO, registry=REGISTRY, device="cuda", verify=True)


@pytest.mark.parametrize(
    "device, error, message",
    [
        ("mps", HostError, "device mps was requested, but this machine has cuda 9.0"),
        ("gpu", ConfigError, "device: 'gpu' is not a device; write cuda or cpu"),
        ("meta", ConfigError, "nothing runs on meta"),
    ],
)
def test_a_device_that_is_not_here_is_refused(device, error, message):
    with pytest.raises(error, match=message):
        bind(build("llama"), AUTO, registry=REGISTRY, device=device)


def test_to_torch_an_amd_gpu_is_called_cuda(monkeypatch):
    monkeypatch.setattr(Hardware, "detect", classmethod(lambda kind: Hardware("rocm", detected=True)))
    assert REGISTRY.detect_hardware("cuda").device_type == "rocm"


def test_of_alternative_devices_the_planned_one_is_named():
    either = HardwareRequirement("npu") | HardwareRequirement("cuda")
    spec = KernelSpec("gpu", "rms_norm", "standard", f"{__name__}:gpu_norm", hardware=either)
    registry = registry_of(spec)
    model = build("llama")
    binding = bind(model, AUTO, registry=registry, device="cuda")
    assert "runs on cuda, and the model's parameters are on cpu" in binding.receipt.to_dict()["misplaced"]
