"""Plugins that define ops, rules and views for everybody: a third party's have the rights that ours have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from veomni_conformance.given_kernels import definitions
from veomni_core import bind, discover, find_sites, make_plan
from veomni_core.discovery.conflicts import settle
from veomni_core.discovery.registry import PluginRecord, build_registry
from veomni_core.errors import BindingError, ConfigError, SpecError, UnknownNameError
from veomni_core.sites.model_view import ModelView, view_of

DEFINITIONS = """
    import torch
    from torch import nn
    from veomni_core import (
        CommandSpec, KernelSpec, ModelRule, ModelViewSpec, OpSpec, SiteRule, hookimpl
    )
    from veomni_core.authoring import ForwardChange, ModelView, Site, WholeModelRule

    VEOMNI_PLUGIN_API_VERSION = 1

    class Doubles(nn.Module):
        def forward(self, x):
            return x + x

    class FindDoubles:
        def find(self, model, rule):
            for path, module in model.named_modules():
                if type(module) is Doubles:
                    yield Site("acme_double", path, rule, "plain", "x + x was compared", dtype="float32")

        def install(self, model, site, kernel, spec):
            yield ForwardChange(model.get_submodule(site.path), lambda self, x: kernel(x))

    class CountSteps(WholeModelRule):
        def refuse(self, model):
            if hasattr(model, "never"):
                from veomni_core.errors import BindingError
                raise BindingError("acme refuses this model")

        def changes(self, model, plan, registry):
            own = type(model).forward
            def forward(self, *args):
                self.steps = getattr(self, "steps", 0) + 1
                return own(self, *args)
            yield "", ForwardChange(model, forward)

    class Half(ModelView):
        def found(self, rule, find):
            return [site for site in find() if site.path != "1"]

    def view(model, distributed_config):
        return Half(model) if distributed_config == "half" else None

    def double(x):
        return 2 * x

    def command():
        print("acme runs")

    PUBLISHED = {"fast": "acme-kernels"}

    @hookimpl
    def veomni_ops():
        field = "acme_double_implementation"
        named = dict(name="acme_double", variants=("plain",), config_field=field)
        return [OpSpec(**named, contract="acme:C", published=PUBLISHED)]

    @hookimpl
    def veomni_sites():
        return [SiteRule("doubles", "{module}:FindDoubles", proves=True)]

    @hookimpl
    def veomni_model_rules():
        return [ModelRule("count steps", "{module}:CountSteps")]

    @hookimpl
    def veomni_model_views():
        return [ModelViewSpec("halves", "{module}:view", order=10)]

    @hookimpl
    def veomni_commands():
        return [CommandSpec("acme", "{module}:command", "runs")]
"""
KERNEL = """
    from veomni_core import KernelSpec, hookimpl
    VEOMNI_PLUGIN_API_VERSION = 1

    def twice(x):
        return 2 * x

    @hookimpl
    def veomni_kernels():
        return [KernelSpec("fast", "acme_double", "plain", "{module}:twice")]
"""


@pytest.fixture
def acme(install):
    """The module of a definitions plugin, which is installed beside a plugin with a kernel for its op."""
    install("acme-kernels", KERNEL)
    module = install("acme-ops", DEFINITIONS, group="veomni.definitions")
    return __import__(module)


def model_of(acme) -> nn.Module:
    return nn.Sequential(acme.Doubles(), acme.Doubles())


def test_its_op_is_found_proven_planned_bound_and_undone(acme):
    model, x = model_of(acme), torch.ones(3)
    registry = discover({"VEOMNI_PLUGINS": "acme-kernels"})
    assert registry.plugin("acme-ops").defines and registry.plugin("veomni-ops").status == "loaded"
    assert [(site.path, site.declared) for site in find_sites(model, registry)] == [("0", False), ("1", False)]
    binding = bind(model, {"preset": "auto"}, registry=registry, device="cpu")
    (op,) = [op for op in binding.receipt.to_dict()["ops"] if op["found"]]
    assert (op["op"], op["bound"], op["declared"]) == ("acme_double", 2, 0)
    assert torch.equal(model(x), 4 * x) and model.steps == 1
    binding.undo()
    assert torch.equal(model(x), 4 * x) and model.steps == 1  # nobody counts any more


def test_its_model_rule_refuses_a_model(acme):
    model = model_of(acme)
    model.never = True
    with pytest.raises(BindingError, match="acme refuses this model"):
        bind(model, {"preset": "auto"}, registry=discover({}), device="cpu")


def test_its_view_says_how_a_model_is_read(acme):
    registry = discover({})
    plan = make_plan(model_of(acme), {"preset": "auto"}, registry=registry, hardware="cpu", distributed_config="half")
    assert [site.site.path for op in plan.ops for site in op.sites] == ["0"]


def test_a_view_that_nobody_has_is_an_error_and_else_a_model_is_read_as_it_is():
    model = nn.Linear(2, 2)
    assert type(view_of(model, build_registry((), {}))) is ModelView
    with pytest.raises(ConfigError, match="no installed plugin knows how a Linear is divided.*veomni-transformers"):
        view_of(model, build_registry((), {}), {"tp_size": 2})


def test_its_command_runs(acme, veomni):
    assert veomni("acme") == "acme runs\n"
    listed = {plugin["name"]: plugin["status"] for plugin in json.loads(veomni("list", "--json"))["plugins"]}
    assert listed["acme-ops"] == "loaded"


def test_it_is_left_out_only_where_it_is_named(acme):
    blocked = discover({"VEOMNI_PLUGINS_BLOCK": "acme-ops"})
    assert blocked.plugin("acme-ops").status == "blocked" and "acme_double" not in blocked.ops
    alone = discover({"VEOMNI_DISABLE_PLUGIN_AUTOLOAD": "1"})
    assert "acme_double" in alone.ops and not [plugin for plugin in alone.plugins if plugin.healthy and plugin.kernels]
    with pytest.raises(UnknownNameError, match="no plugin 'acme-opps'"):
        discover({"VEOMNI_PLUGINS": "acme-opps"})


def test_a_plugin_with_kernels_is_no_definition(install):
    install(
        "acme-both", KERNEL.replace("acme_double", "rms_norm").replace("plain", "standard"), group="veomni.definitions"
    )
    record = discover({}).plugin("acme-both")
    assert record.status == "failed" and "declare it under veomni.plugins" in record.problem


def test_a_rule_of_it_that_fails_is_an_error(install):
    broken = DEFINITIONS.replace("if type(module) is Doubles:", "if 1 / 0:")
    install("acme-ops", broken, group="veomni.definitions")
    with pytest.raises(SpecError, match=r"site rule 'doubles' .* failed on Linear: ZeroDivisionError"):
        find_sites(nn.Linear(2, 2), discover({}))


def test_a_name_that_it_claims_is_its_own(acme):
    ops = discover({}).plugin("acme-ops").ops
    thief = PluginRecord("thief", "thief", "1", "thief", ops=ops)
    both = [*definitions(), thief]
    problems = {record.name: record.problem for record in settle(both) if record.problem}
    assert list(problems) == ["thief"] and "acme-ops 1.0" in problems["thief"]


def test_without_a_rule_nothing_is_bound_in_silence(tmp_path: Path):
    with pytest.raises(BindingError, match="no installed plugin finds ops in models.*pip install veomni-transformers"):
        bind(nn.Linear(2, 2), {}, registry=build_registry((), {}), device="cpu")
