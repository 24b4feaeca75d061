"""Kernels that nobody vouches for, and plugins that can't be loaded: others run, and plan and receipt say why."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest
import torch

from models import build
from planned_norms import chosen, kernel, plan, reasons, registry, vouching
from veomni_conformance.given_kernels import definitions
from veomni_conformance.ledger import Certificate, record
from veomni_conformance.this_machine import ThisMachine
from veomni_core import Hardware, OpSpec, Plan, Site, VariantSpec, bind, binding_of, discover, make_plan
from veomni_core.discovery.registry import PluginRecord, build_registry
from veomni_core.errors import ConformanceError, KernelLoadError, KernelUnavailableError

CPU = Hardware.cpu()
NORM = Site("rms_norm", "layers.0.norm", "norm modules", "standard", "proven", "float32")
STRANGERS = registry(kernel("acme"), vouched_for=False)
NEVER = (
    "acme was never verified here, and auto takes a kernel that the op's own plugin does not name only once it passed"
)
BAD = """
from veomni_core import KernelSpec, hookimpl

VEOMNI_PLUGIN_API_VERSION = 1

def kernel(x, weight, eps):
    return 1.5 * torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)

@hookimpl
def veomni_kernels():
    return [KernelSpec("acme", "rms_norm", "standard", factory="{module}:kernel")]
"""


def planned(value="auto", hardware=CPU, of=STRANGERS):
    return plan(value, (NORM,), hardware, of)


def certify(dtype="float32"):
    (spec,) = STRANGERS.kernels("rms_norm")
    checked = ThisMachine(CPU).checked(spec, STRANGERS.plugin("p"), dtype)
    record([Certificate.of_today(checked, {"odd": (0.5, 0.1)})], {})


def test_a_stranger_waits_for_its_check_and_is_taken_then():
    waiting = planned()
    assert chosen(waiting) == ["eager"] and NEVER in reasons(waiting)[0]
    assert "(veomni verify veomni-p --kernel rms_norm/standard:acme checks it)" in waiting.table()
    assert chosen(planned(hardware="h200")) == ["eager"]  # where nobody can have looked
    certify("bfloat16")
    assert chosen(planned()) == ["eager"]
    certify()
    assert chosen(planned()) == ["acme"] and not planned().passed_by


def test_naming_one_stands_and_is_said():
    named = planned("acme")
    assert chosen(named) == ["acme"] and f"as asked: rms_norm/standard:{NEVER}" in named.table()
    assert Plan.from_json(named.to_json()) == named
    certify()
    assert planned("acme").unverified == ()


@pytest.mark.parametrize("variant", ["standard", "acme_norm"])
def test_who_defines_an_op_or_a_variant_vouches_for_its_own_kernels(variant):
    own = OpSpec("acme_op", ("standard",), "acme_op_implementation", contract="m:c")
    kernels = (kernel("acme", op="acme_op"), kernel("acme", variant))
    variants = (VariantSpec("rms_norm", "acme_norm", contract="m:c"),)
    record = PluginRecord("p", "veomni-p", "1", "p", ops=(own,), variants=variants, kernels=kernels)
    found = build_registry([*definitions(), record], {})
    assert found.vouches_for(kernels[0]) and found.vouches_for(kernels[1]) == (variant == "acme_norm")


def test_every_kernel_of_ours_is_vouched_for():
    found = discover({})
    specs = [spec for record in found.plugins for spec in record.kernels]
    assert specs and all(map(found.vouches_for, specs))


def test_a_wrong_norm_of_another_distribution_is_bound_by_nobody_but_who_names_it(install):
    install("acme-bad", BAD.replace("from veomni_core", "import torch\nfrom veomni_core", 1))
    found = discover({})
    eager, model = build("llama"), build("llama")
    model.load_state_dict(eager.state_dict())
    binding = bind(model, {"preset": "auto"}, registry=found)
    assert {str(each.spec) for each in binding.plan.kernels} >= {"rms_norm/standard:torch"}
    receipt = binding.receipt
    assert f"Passed by: rms_norm/standard:{NEVER}" in receipt.table() and receipt.to_dict()["passed_by"]
    ids = torch.tensor([[5, 9, 17, 3]])
    torch.testing.assert_close(model(ids).logits, eager(ids).logits)
    binding.undo()
    by_name = bind(model, {"preset": "eager", "rms_norm_implementation": "acme"}, registry=found)
    assert f"As asked: rms_norm/standard:{NEVER}" in by_name.receipt.table() and by_name.receipt.to_dict()["unverified"]


def test_one_through_which_no_gradient_arrives_is_not_trained_even_if_it_is_named(install):
    install(
        "acme-lost",
        BAD.replace("from veomni_core", "import torch\nfrom veomni_core", 1)
        .replace("1.5 * ", "")
        .replace("(x, (x", "(x.detach(), (x"),
    )
    found, model, named = discover({}), build("llama"), {"preset": "eager", "rms_norm_implementation": "acme"}
    said = (
        r"rms_norm/standard:acme of acme-lost .* gives no gradient to x, .* at model.layers.0.input_layernorm and 4"
        " more.*veomni verify acme-lost --kernel rms_norm/standard:acme"
    )
    with pytest.raises(ConformanceError, match=said):
        bind(model, named, registry=found)
    assert binding_of(model) is None
    bind(model, named, registry=found, training=False)


def test_a_verified_build_lets_auto_take_it(install):
    install("acme-right", BAD.replace("from veomni_core", "import torch\nfrom veomni_core", 1).replace("1.5 * ", ""))
    found, model = discover({}), build("llama")
    with torch.no_grad():
        bind(model, {"preset": "eager", "rms_norm_implementation": "acme"}, registry=found).undo()
    bind(model, {"preset": "eager", "rms_norm_implementation": "acme"}, registry=found, verify=True).undo()
    taken = bind(model, {"preset": "eager", "rms_norm_implementation": "auto"}, registry=found).plan
    assert [str(each.spec) for each in taken.kernels] == ["rms_norm/standard:acme"]


@pytest.mark.parametrize("factory", ["gone.module:kernel", "json:gone", "acme_exits:kernel", "acme_interrupts:kernel"])
def test_a_kernel_that_can_not_be_loaded_is_passed_by(factory, tmp_path, monkeypatch):
    (tmp_path / "acme_exits.py").write_text("raise SystemExit")
    (tmp_path / "acme_interrupts.py").write_text("raise KeyboardInterrupt")
    monkeypatch.syspath_prepend(tmp_path)
    best = replace(kernel("acme", preference=99), factory=factory)
    found = discover({})
    found = build_registry([*found.plugins, PluginRecord("p", "veomni-p", "1", "p", kernels=(best,))], {})
    found, model = vouching(found, best), build("llama")
    binding = bind(model, {"preset": "eager", "rms_norm_implementation": "auto"}, registry=found)
    assert [str(each.spec) for each in binding.plan.kernels] == ["rms_norm/standard:torch"]
    assert f"Passed by: {best} can't be loaded: {factory} failed" in binding.receipt.table()
    binding.undo()
    with pytest.raises(KernelLoadError, match="failed"):
        bind(model, {"preset": "eager", "rms_norm_implementation": "acme"}, registry=found)
    assert not make_plan(model, {"preset": "auto"}, registry=found, hardware="h200").passed_by  # not on this machine


HALF_GONE = """
from veomni_core import DeviceSpec, ModelRule, ModelViewSpec, SiteRule, hookimpl

VEOMNI_PLUGIN_API_VERSION = 1

@hookimpl
def veomni_sites():
    return [SiteRule("acme sites", "gone.sites:Sites")]

@hookimpl
def veomni_model_rules():
    return [ModelRule("acme rule", "gone.rules:Rule")]

@hookimpl
def veomni_model_views():
    return [ModelViewSpec("acme view", "gone.views:view", order=0)]

@hookimpl
def veomni_devices():
    return [DeviceSpec("acme", detect="gone.device:detect")]
"""


def test_a_plugin_that_is_half_uninstalled_harms_no_job_that_does_not_name_it(install, caplog):
    install("acme-half", HALF_GONE)
    binding = bind(build("llama"), {"preset": "auto"}, registry=discover({}))
    assert binding.plan.kernels and "acme sites" in binding.plan.failed_rules[0]
    assert "'acme rule' of acme-half 1.0 is left out" in caplog.text and "'acme view'" in caplog.text


def test_a_plugin_that_interrupts_is_named_without_the_command_too(install, capsys):
    install("acme-interrupts", "print('hello')\nraise KeyboardInterrupt\n")
    assert discover({}).plugin("acme-interrupts").problem == "KeyboardInterrupt"
    assert capsys.readouterr() == ("", "hello\n")


INTERRUPTING = """
from veomni_core import KernelSpec, SiteRule, hookimpl

VEOMNI_PLUGIN_API_VERSION = 1

def kernel(x, weight, eps):
    return x

def raises(*site):
    raise {error}

@hookimpl
def veomni_sites():
    return [SiteRule("acme sites", "{module}:raises")]

@hookimpl
def veomni_kernels():
    return [KernelSpec("acme", "rms_norm", "standard", factory="{module}:kernel", can_run="{module}:raises")]
"""


@pytest.mark.parametrize("error", ["KeyboardInterrupt", "SystemExit", "ValueError"])
def test_what_a_rule_or_can_run_raises_is_a_reason(install, error):
    install("acme-raises", INTERRUPTING.replace("{error}", error))
    found = discover({})
    binding = bind(build("llama"), {"preset": "auto", "rms_norm_implementation": ["acme", "torch"]}, registry=found)
    assert "'acme sites' (acme_raises_" in binding.plan.failed_rules[0] and error in binding.plan.failed_rules[0]
    norms = next(op for op in binding.plan.ops if op.op_name == "rms_norm")
    assert norms.chosen == ("torch",) and f"raises failed: {error}" in norms.sites[0].reason


def test_an_interrupt_of_the_user_ends_a_search(monkeypatch):
    """``signal.raise_signal`` is what Ctrl-C does: no ``raise`` statement gives it."""
    monkeypatch.setattr("veomni_core.sites.find._sites_of", lambda *_: signal.raise_signal(signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a worker of pytest-xdist ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            make_plan(build("llama"), {"preset": "auto"})
    finally:
        signal.signal(signal.SIGINT, before)


def test_code_of_one_that_auto_does_not_take_is_not_run(install):
    module = install(
        "acme-asks",
        BAD.replace("from veomni_core", "import torch\nfrom veomni_core", 1)
        .replace("@hookimpl", "def can_run(site):\n    raise SystemExit('asked')\n\n@hookimpl")
        .replace('factory="{module}:kernel"', 'factory="{module}:kernel", can_run="{module}:can_run"'),
    )
    found, model = discover({}), build("llama")
    planned = make_plan(model, {"preset": "auto"}, registry=found)
    assert f"rms_norm/standard:{NEVER}" in planned.table() and "asked" not in planned.table()
    with pytest.raises(KernelUnavailableError, match=f"can't be asked: {module}:can_run failed: SystemExit: asked"):
        make_plan(model, {"preset": "eager", "rms_norm_implementation": "acme"}, registry=found)


def test_plans_and_receipts_name_a_plugin_that_failed(install):
    install("acme-broken", "raise RuntimeError('half installed')")
    found, model = discover({}), build("llama")
    binding = bind(model, {"preset": "auto"}, registry=found)
    said = "acme-broken 1.0: RuntimeError: half installed"
    assert f"left out: {said}" in binding.plan.table()
    assert f"Left out: {said}" in binding.receipt.table()
