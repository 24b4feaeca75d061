"""Kernels that a job's own code registers, without a distribution: planned, checked and in the receipt as any other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from veomni_core import KERNEL_REGISTRY, KernelSpec, OpSlot, bind, discover, make_plan
from veomni_core.cli.list_kernels import list_kernels
from veomni_core.errors import ConformanceError, KernelLoadError, LockMismatchError, SpecError
from veomni_ops.own_kernels import THIS_PROCESS
from veomni_tools.locks.lock_file import Lock
from veomni_tools.locks.locked import refuse_changed_specs

SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
NAMED = {"preset": "eager", "rms_norm_implementation": "mine"}


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def made() -> Any:  # as VeOmni's factories: without parameters, it returns the kernel
    return norm


def wrong(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return norm(x, weight, 2 * eps)


def spec(**fields: Any) -> KernelSpec:
    return KernelSpec(**{"name": "mine", "op_name": "rms_norm", "variant": "standard", "factory": made, **fields})


@pytest.fixture(autouse=True)
def nothing_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(KERNEL_REGISTRY, "_kernels", {})
    monkeypatch.setenv("VEOMNI_CACHE", str(tmp_path))


@pytest.fixture
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE, vocab_size=64))


def chosen(plan: Any) -> set[str]:
    return {decision.kernel for decision in plan.decisions if decision.site.op_name == "rms_norm"}


def test_one_is_bound_and_undone_and_says_whose_it_is(model, capsys):
    ids = torch.tensor([[5, 9, 17, 3]])
    eager = model(ids, labels=ids).loss
    KERNEL_REGISTRY.register(spec())
    with bind(model, NAMED) as binding:
        torch.testing.assert_close(model(ids, labels=ids).loss, eager)
        (kernel,) = binding.receipt.to_dict()["kernels"]
        assert (kernel["factory"], kernel["distribution"]) == (f"{__name__}:made", THIS_PROCESS)
        assert len(kernel["version"]) == 12
        assert "bind(..., verify=True) checks it" in binding.plan.table()
    assert torch.equal(model(ids, labels=ids).loss, eager)
    list_kernels()
    assert f"{THIS_PROCESS} {kernel['version']}" in capsys.readouterr().out
    KERNEL_REGISTRY.unregister(spec())
    assert not discover().find("rms_norm", "standard", "mine")


def test_auto_takes_it_once_it_has_passed(model):
    KERNEL_REGISTRY.register(spec(preference=99))
    plan = make_plan(model, {"preset": "auto"})
    assert chosen(plan) == {"torch"}
    bind(model, NAMED, verify=True).undo()
    assert chosen(make_plan(model, {"preset": "auto"})) == {"mine"}


def test_a_wrong_one_is_refused_where_it_is_verified(model):
    KERNEL_REGISTRY.register(spec(factory=wrong))
    with pytest.raises(ConformanceError, match="rms_norm/standard:mine"):
        bind(model, NAMED, verify=True)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"op_name": "rms_nrm"}, "op 'rms_nrm' is unknown. Did you mean 'rms_norm'"),
        ({"variant": "standrd"}, "rms_norm has no variant 'standrd'. Did you mean 'standard'"),
        (
            {"name": "torch"},
            "rms_norm/standard:torch is claimed by this-process .* and veomni-torch .*: name yours other",
        ),
        ({"factory": lambda: norm}, '"module:attribute", or be a function at the top of a module'),
    ],
)
def test_what_can_t_be_used_is_refused_at_once(fields, problem):
    with pytest.raises(SpecError, match=problem):
        KERNEL_REGISTRY.register(spec(**fields))
    assert KERNEL_REGISTRY.records() == []
    with pytest.raises(SpecError, match="register takes KernelSpec"):
        KERNEL_REGISTRY.register("mine")


def test_a_name_is_one_kernel_s_and_a_cell_may_run_again():
    KERNEL_REGISTRY.register(spec())
    KERNEL_REGISTRY.register(spec(description="run again"))
    assert discover().resolve("rms_norm", "standard", "mine").description == "run again"
    with pytest.raises(SpecError, match=r"registered already, with [\w.]+:made: unregister that"):
        KERNEL_REGISTRY.register(spec(factory=norm))
    with pytest.raises(SpecError, match="twice"):
        KERNEL_REGISTRY.register(spec(variant="offset")) or KERNEL_REGISTRY.register(spec(variant="qwen3_5"))
    assert discover().resolve("rms_norm", "standard", "mine").factory == f"{__name__}:made"


def test_a_function_that_is_defined_anew_has_passed_nothing(model, monkeypatch):
    KERNEL_REGISTRY.register(spec(preference=99))
    bind(model, NAMED, verify=True).undo()
    (checked,) = make_plan(model, {"preset": "auto", "require": "verified"}).kernels
    monkeypatch.setattr(sys.modules[__name__], "made", lambda: wrong)  # as a notebook's cell that runs again
    assert chosen(make_plan(model, {"preset": "auto"})) == {"torch"}
    (kernel,) = make_plan(model, NAMED).kernels
    assert kernel.version != checked.version and checked.version in kernel.standing
    assert make_plan(model, NAMED).kernels == (kernel,)
    monkeypatch.delattr(sys.modules[__name__], "made")
    with pytest.raises(KernelLoadError, match="mine: .*made failed"):
        bind(model, NAMED)


def test_an_op_has_veomnis_name_too():
    rotary = spec(op_name="apply_rotary_pos_emb", variant="full")
    KERNEL_REGISTRY.register(rotary)
    assert discover().find("rotary_pos_emb", "full", "mine")
    KERNEL_REGISTRY.unregister(rotary)
    assert not discover().find("rotary_pos_emb", "full", "mine")


def test_a_lock_file_does_not_know_it():
    KERNEL_REGISTRY.register(spec())
    lock = Lock({})
    with pytest.raises(LockMismatchError, match="own code has registered rms_norm/standard:mine; a lock has what is"):
        refuse_changed_specs(lock, KERNEL_REGISTRY.records())


def test_a_slot_of_modeling_code_takes_it():
    class Norm(nn.Module):
        slot = OpSlot("rms_norm", "standard")

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return self.slot(x, self.weight, 1e-6) if self.slot.has_kernel else x

    KERNEL_REGISTRY.register(spec())
    module, x = Norm(), torch.randn(2, 4)
    bind(module, NAMED)
    torch.testing.assert_close(module(x), norm(x, module.weight, 1e-6))


SCRIPT = """
from veomni_core import KERNEL_REGISTRY, KernelSpec, Site, plan_sites

def norm(x, weight, eps):
    return x

KERNEL_REGISTRY.register(KernelSpec("mine", "rms_norm", "standard", factory=norm))
site = Site("rms_norm", "norm", "a rule", "standard", "given", dtype="bfloat16")
(kernel,) = plan_sites([site], {"preset": "eager", "rms_norm_implementation": "mine"}, hardware="h100").kernels
print(kernel.spec.factory, kernel.version)
"""


@pytest.mark.parametrize("as_file", [True, False], ids=["a script", "without a file"])
def test_the_version_is_a_hash_of_the_code(as_file: bool, tmp_path: Path):
    script = tmp_path / "train.py"
    found = []
    for each in (SCRIPT, SCRIPT, SCRIPT.replace("return x", "return 2 * x")):
        script.write_text(each)
        code = [str(script)] if as_file else ["-c", each]
        ran = subprocess.run([sys.executable, *code], capture_output=True, text=True, check=True)
        found.append(ran.stdout.split())
    assert [name for name, _ in found] == ["__main__:norm"] * 3
    assert (found[0] == found[1]) is as_file  # without a file, nothing says that the code is the same
    assert found[1] != found[2]
