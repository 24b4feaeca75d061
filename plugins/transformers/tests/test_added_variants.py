"""A plugin adds a variant to an op that it doesn't define: a contract, a kernel, and a rule that finds its sites."""

from __future__ import annotations

from importlib.metadata import version
from typing import ClassVar

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from models import build
from veomni_conformance import check_kernel
from veomni_core import VariantSpec, bind, discover, find_sites
from veomni_core.errors import ConformanceError, ContractError, SpecError
from veomni_ops.contract import contract_for
from veomni_ops.rms_norm import CONTRACTS
from veomni_transformers.authoring import NormModules

PLUGIN = """
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import nn

from veomni_core import KernelSpec, SiteRule, VariantSpec, hookimpl
from veomni_transformers.authoring import NormModules
from veomni_core.changes.change import ForwardChange
from veomni_ops.rms_norm import CONTRACTS, standard
from veomni_core.sites.site import Site

VEOMNI_PLUGIN_API_VERSION = 1


def halved(x, weight, eps):
    return (standard(x, weight, eps) / 2).to(x.dtype)


def kernel(x, weight, eps):
    return halved(x, weight, eps){wrong}


CONTRACT = replace(CONTRACTS["standard"], variant="halved", reference=halved, rounding={})


class HalvedNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return halved(x, self.weight, 1e-6)


class ItsNorms(NormModules):
    contracts = MappingProxyType({"halved": CONTRACT})


class HalvedNorms:
    def find(self, model, rule):
        for path, module in model.named_modules():
            if isinstance(module, HalvedNorm):
                yield Site("rms_norm", path, rule, "halved", "is a HalvedNorm", "float32")

    def install(self, model, site, kernel, spec):
        yield ForwardChange(model.get_submodule(site.path), lambda self, x: kernel(x, self.weight, 1e-6))


@hookimpl
def veomni_variants():
    return [VariantSpec("{op}", "{variant}", "{module}:{contract}")]


@hookimpl
def veomni_kernels():
    return [KernelSpec("acme", "{op}", "{variant}", "{module}:kernel")]


@hookimpl
def veomni_sites():
    return [SiteRule("halved norms", "{module}:HalvedNorms")]
"""


def source(wrong="", op="rms_norm", variant="halved", contract="CONTRACT"):
    text = PLUGIN.replace("{wrong}", wrong).replace("{op}", op).replace("{variant}", variant)
    return text.replace("{contract}", contract)


def model_of(registry):
    model = build("llama")
    model.model.norm = __import__(registry.plugin("acme-norms").module).HalvedNorm(model.config.hidden_size)
    return model


def test_its_kernel_is_checked_planned_bound_and_verified(install):
    install("acme-norms", source())
    registry = discover({})
    (spec,) = registry.plugin("acme-norms").kernels
    check_kernel(spec, "cpu", "float32", op=registry.op("rms_norm")).raise_if_failed()
    model = model_of(registry)
    (site,) = (site for site in find_sites(model, registry) if site.path == "model.norm")
    assert (site.variant, site.declared) == ("halved", True)
    config = {"preset": "eager", "rms_norm_implementation": "acme"}
    binding = bind(model, config, registry=registry, verify=True)
    assert [d.site.path for op in binding.plan.ops for d in op.sites if d.kernel == "acme"] == ["model.norm"]
    assert binding.verification.sites == ("rms_norm/halved:acme at 1 sites",)


@pytest.mark.parametrize("factor", [1.0, 1.01])
def test_the_core_s_proof_runs_over_an_added_variant_for_a_plugin_s_rule(install, factor):
    install("acme-norms", source().replace(":HalvedNorms", ":ItsNorms"))
    registry = discover({})

    class HalvedRMSNorm(LlamaRMSNorm):
        def forward(self, x):
            return (super().forward(x) * (self.factor / 2)).to(x.dtype)

    model = nn.Sequential(HalvedRMSNorm(8), LlamaRMSNorm(8))
    model[0].factor = factor
    sites = find_sites(model, registry)
    proven = [(site.path, site.rule, site.variant, site.declared) for site in sites if site.variant is not None]
    own = ("1", "norm modules", "standard", False)
    if factor != 1.0:
        assert proven == [own], sites
        return
    assert proven == [("0", "halved norms", "halved", True), own], sites
    config = {"preset": "eager", "rms_norm_implementation": "acme"}
    with bind(model, config, registry=registry) as binding:
        assert [d.site.path for op in binding.plan.ops for d in op.sites if d.bound] == ["0"]


def test_a_kernel_that_computes_something_else_is_caught(install):
    install("acme-norms", source(" * 1.1"))
    registry = discover({})
    with pytest.raises(ConformanceError, match="rms_norm/halved:acme on cpu in float32"):
        bind(
            model_of(registry),
            {"preset": "eager", "rms_norm_implementation": "acme"},
            registry=registry,
            verify=True,
        )


def test_the_op_has_its_own_variants_besides(install):
    own = discover({}).op("rms_norm").variants
    install("acme-norms", source())
    op = discover({}).op("rms_norm")
    assert op.variants == (*own, "halved")
    x, weight = torch.randn(2, 8), torch.ones(8)
    halved, standard = (contract_for(op, variant).reference(x, weight, 1e-6) for variant in ("halved", "standard"))
    torch.testing.assert_close(halved, standard / 2)


def test_a_variant_that_the_op_has_already_fails_its_plugin(install):
    install("acme-norms", source(variant="qwen3_5"))  # an alias
    record = discover({}).plugin("acme-norms")
    assert record.problem == f"veomni-ops {version('veomni-ops')} has the variant rms_norm/qwen3_5 already"


def test_a_variant_that_two_plugins_add_fails_both(install):
    install("acme-norms", source())
    install("other-norms", source())
    registry = discover({})
    problems = {registry.plugin(name).problem for name in ("acme-norms", "other-norms")}
    assert problems == {"the variant rms_norm/halved is defined by acme-norms 1.0 and other-norms 1.0"}
    assert "halved" not in registry.op("rms_norm").variants


def test_a_variant_of_an_unknown_op_leaves_out_its_kernels_with_the_reason(install):
    install("acme-norms", source(op="rms_nrm"))
    record = discover({}).plugin("acme-norms")
    assert record.healthy
    assert [skipped.reason for skipped in record.skipped] == ["op 'rms_nrm' is unknown. Did you mean 'rms_norm'?"]


@pytest.mark.parametrize(
    ("contract", "why"), [("MISSING", "AttributeError"), ("kernel", "is a function, not a Contract")]
)
def test_a_contract_that_is_none_is_told_where_it_is_used(install, contract, why):
    install("acme-norms", source(contract=contract))
    registry = discover({})
    (spec,) = registry.plugin("acme-norms").kernels
    with pytest.raises(ContractError, match=why):
        check_kernel(spec, "cpu", "float32", op=registry.op("rms_norm"))


def test_the_contract_of_another_variant_is_refused(install):
    install("acme-norms", source(variant="quartered"))
    registry = discover({})
    (spec,) = registry.plugin("acme-norms").kernels
    with pytest.raises(ContractError, match="is the contract of rms_norm/halved"):
        check_kernel(spec, "cpu", "float32", op=registry.op("rms_norm"))


def test_a_reference_that_is_none_is_refused():
    with pytest.raises(SpecError, match="contract"):
        VariantSpec("rms_norm", "halved", "CONTRACT")


class WeightedNorms(NormModules):
    contracts: ClassVar = {"halved": CONTRACTS["standard"], "doubled": CONTRACTS["cast_after"]}


class UnweightedNorms(NormModules):
    contracts: ClassVar = {"unweighted": CONTRACTS["unweighted"]}


@pytest.mark.parametrize(
    ("locator", "has_weight", "said"),
    [
        (WeightedNorms, False, "it has no weight, and is compared with norms with one alone: halved, doubled"),
        (UnweightedNorms, True, "it has a weight, and is compared with norms without one alone: unweighted"),
    ],
)
def test_a_norm_that_no_variant_of_a_subclass_can_take_is_told_why(locator, has_weight, said):
    model = nn.Sequential(nn.RMSNorm(8, eps=1e-6, elementwise_affine=has_weight))
    ((variant, evidence),) = [(site.variant, site.evidence) for site in locator().find(model, "its norms")]
    assert (variant, evidence) == (None, said)
