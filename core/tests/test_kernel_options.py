"""What a job sets of a kernel's options: checked in the config, part of the plan, and given to the kernel's factory."""

from __future__ import annotations

import functools
import json
import sys
from types import ModuleType

import pytest

from models import assert_equal_steps, build, step
from veomni_conformance.given_kernels import definitions
from veomni_core import KernelOption, KernelSpec, OpsConfig, Plan, bind, make_plan
from veomni_core.discovery.registry import PluginRecord, build_registry
from veomni_core.errors import ConfigError, KernelLoadError, KernelUnavailableError, SpecError, UnknownNameError
from veomni_ops import attention, rms_norm

FIELD = "rms_norm_implementation"
ROWS = KernelOption("rows", 4, minimum=1)
EXACT = KernelOption("exact", False)
ORDER = KernelOption("order", "up", choices=("up", "down"))
SCALE = KernelOption("scale", 1.0)
made: list[dict[str, object]] = []


@pytest.fixture(autouse=True)
def _kernels(monkeypatch):
    module = ModuleType("acme_norms")

    def factory(**options):
        made.append(options)
        return lambda *args: rms_norm.CONTRACTS["standard"].reference(*args)

    module.factory = factory  # type: ignore[attr-defined]
    module.takes_none = lambda: rms_norm.CONTRACTS["standard"].reference  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "acme_norms", module)
    made.clear()


def registry(*more, options=(ROWS, EXACT, ORDER, SCALE), factory="acme_norms:factory"):
    acme = KernelSpec("acme", "rms_norm", "standard", factory, options=options)
    return build_registry([*definitions(), PluginRecord("p", "veomni-p", "1.2", "p", kernels=(acme, *more))], {})


def config(value, known=None):
    return OpsConfig.from_dict({"preset": "eager", FIELD: value}, known or registry(), environ={})


def norms(plan):
    (op,) = (op for op in plan.ops if op.op_name == "rms_norm")
    return op


def test_the_factory_gets_what_the_job_sets_and_the_defaults_of_the_rest():
    model = build("llama")
    binding = bind(model, config({"kernel": "acme", "options": {"rows": 8, "order": "down", "scale": 2}}))
    assert made == [{"rows": 8, "exact": False, "order": "down", "scale": 2.0}]
    assert type(made[0]["scale"]) is float
    (kernel,) = binding.receipt.to_dict()["kernels"]
    assert kernel["options"] == {"order": "down", "rows": 8, "scale": 2.0}
    assert kernel["kernel"] == "rms_norm/standard:acme(order='down', rows=8, scale=2.0)"
    assert "rows=8" in binding.receipt.table()


def test_without_options_the_factory_gets_the_defaults():
    bind(build("llama"), config("acme"))
    assert made == [{"rows": 4, "exact": False, "order": "up", "scale": 1.0}]


def test_options_are_set_per_site_and_each_setting_is_made_once():
    few = {"kernel": "acme", "options": {"rows": 2}}
    plan = make_plan(build("llama"), config({"*.input_layernorm": few, "default": "acme"}))
    kernels = {decision.site.path: decision.kernel for decision in norms(plan).sites}
    assert kernels["model.layers.0.input_layernorm"] == "acme(rows=2)"
    assert kernels["model.norm"] == "acme"
    assert [kernel.spec.label for kernel in plan.kernels] == ["acme", "acme(rows=2)"]
    bind(build("llama"), config({"*.input_layernorm": few, "default": "acme"}))
    assert sorted(options["rows"] for options in made) == [2, 4]


def test_options_are_part_of_a_plan_s_identity_and_of_its_json():
    model = build("llama")
    plain = make_plan(model, config("acme"))
    eight = make_plan(model, config({"kernel": "acme", "options": {"rows": 8}}))
    assert plain.sha256 != eight.sha256
    assert plain.diff(eight)[0].startswith("rms_norm: acme -> acme(rows=8) at ")
    again = Plan.from_json(eight.to_json())
    assert again == eight
    assert json.loads(eight.to_json())["kernels"][0]["spec"]["settings"] == [["rows", 8]]


def test_an_entry_with_options_may_stand_in_a_list():
    known = registry()
    plan = make_plan(build("llama"), config(["quack", {"kernel": "acme", "options": {"rows": 8}}, "eager"], known))
    assert {decision.kernel for decision in norms(plan).sites} == {"acme(rows=8)"}


@pytest.mark.parametrize(
    "options, message",
    [
        ({"rows": 0}, f"{FIELD}: rows must be at least 1, got 0"),
        ({"rows": "8"}, f"{FIELD}: rows must be of type int, got '8'"),
        ({"rows": True}, f"{FIELD}: rows must be of type int, got True"),
        ({"rows": 1.5}, f"{FIELD}: rows must be of type int, got 1.5"),
        ({"exact": 1}, f"{FIELD}: exact must be of type bool, got 1"),
        ({"order": "sideways"}, f"{FIELD}: order must be one of 'up', 'down', got 'sideways'"),
        ({"row": 8}, "rms_norm/standard:acme has no option 'row'. Did you mean 'rows'?"),
        ([8], f"{FIELD}: options: expected a mapping from names to values"),
    ],
)
def test_a_wrong_value_is_refused_in_the_config(options, message):
    with pytest.raises(ConfigError) as refused:
        config({"kernel": "acme", "options": options})
    assert message in str(refused.value)


def test_a_kernel_without_options_says_so():
    with pytest.raises(ConfigError, match=r"rms_norm/standard:acme has no option 'rows'\. It has none"):
        config({"kernel": "acme", "options": {"rows": 8}}, registry(options=()))


@pytest.mark.parametrize("name", ["auto", "eager"])
def test_what_is_no_kernel_has_no_options(name):
    with pytest.raises(ConfigError, match=f"{name} has no options; name the kernel that they are for"):
        config({"kernel": name, "options": {"rows": 8}})


def test_a_key_beside_kernel_that_is_not_options_is_refused():
    with pytest.raises(ConfigError, match=r"'option' is unknown beside 'kernel'\. Did you mean 'options'\?"):
        config({"kernel": "acme", "option": {"rows": 8}})
    with pytest.raises(UnknownNameError, match="'acne' is unknown"):
        config({"kernel": "acne", "options": {"rows": 8}})


def test_a_variant_s_kernel_without_the_option_is_passed_over_with_the_reason():
    plain = KernelSpec("acme", "rms_norm", "offset", "m:f")
    known = registry(plain)
    with pytest.raises(KernelUnavailableError, match="acme has no option rows for offset"):
        make_plan(build("gemma3_text"), config({"kernel": "acme", "options": {"rows": 8}}, known))


def test_a_value_that_one_variant_alone_allows_is_passed_over_at_the_others():
    least = KernelSpec("acme", "rms_norm", "offset", "m:f", options=(KernelOption("rows", 64, minimum=32),))
    asked = config([{"kernel": "acme", "options": {"rows": 8}}, "eager"], registry(least))
    plan = make_plan(build("gemma3_text"), asked)
    reasons = {decision.reason for decision in norms(plan).sites}
    assert reasons == {"as asked, after: acme refuses an option for offset: rows must be at least 32, got 8"}


def test_a_factory_that_does_not_take_them_is_named():
    with pytest.raises(KernelLoadError, match=r"rms_norm/standard:acme: acme_norms:takes_none failed: TypeError"):
        bind(build("llama"), config("acme", registry(factory="acme_norms:takes_none")))


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"default": None}, "default must be a bool, int, float or str"),
        ({"default": "x", "minimum": 1}, "minimum is for numbers"),
        ({"default": 0, "minimum": 1}, "rows must be at least 1, got 0"),
        ({"default": 4, "choices": (1, 2)}, "rows must be one of 1, 2, got 4"),
    ],
)
def test_a_wrong_description_is_refused(fields, message):
    with pytest.raises(SpecError, match=message):
        KernelOption("rows", **fields)


def test_two_options_of_one_name_are_refused():
    with pytest.raises(SpecError, match="two of its options have the same name"):
        KernelSpec("acme", "rms_norm", "standard", "m:f", options=(ROWS, ROWS))


def test_one_description_serves_several_variants():
    specs = KernelSpec.for_variants(("standard", "offset"), name="acme", op_name="rms_norm", factory="m.{variant}:f")
    assert [(spec.variant, spec.factory) for spec in specs] == [("standard", "m.standard:f"), ("offset", "m.offset:f")]


class Attention:
    """A kernel that is an object, as one that keeps what a job sets may be."""

    def __call__(self, module, query, key, value, mask, **options):
        return attention.CONTRACTS["standard"].reference(module, query, key, value, mask, **options)


@pytest.mark.parametrize("made_as", ["a partial", "an object"])
def test_an_attention_kernel_may_be_whatever_can_be_called(made_as, monkeypatch):
    def factory(rows):
        return functools.partial(Attention().__call__) if made_as == "a partial" else Attention()

    monkeypatch.setattr(sys.modules["acme_norms"], "factory", factory)
    acme = KernelSpec("acme", "attention", "standard", "acme_norms:factory", options=(ROWS,))
    known = build_registry([*definitions(), PluginRecord("p", "veomni-p", "1.2", "p", kernels=(acme,))], {})
    chosen = {"preset": "eager", "attn_implementation": {"kernel": "acme", "options": {"rows": 8}}}
    model = build("llama")
    with bind(model, chosen, registry=known, device="cpu") as binding:
        assert binding.receipt.to_dict()["kernels"][0]["kernel"] == "attention/standard:acme(rows=8)"
        assert model.config._attn_implementation == "sdpa"
        assert_equal_steps(step(model), step(build("llama")))
