"""The coverage page has what the command finds in the installed transformers, in the memory it may take."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest
import torch
from typer.testing import CliRunner

from coverage_page import COMMAND, coverage_page
from veomni_conformance.given_kernels import definitions
from veomni_core import SiteRule
from veomni_core.cli.app import build_app
from veomni_core.discovery.discover import discover
from veomni_core.discovery.registry import PluginRecord, build_registry
from veomni_core.errors import UnknownNameError
from veomni_transformers.coverage import claims, cover, model_types

README = Path(__file__).resolve().parent.parent / "README.md"
SETTLED = "with RMS norms: every norm, rotary embedding and gated MLP proven or refused"


@pytest.fixture(scope="module")
def models():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more than one get in each other's way on tiny tensors, and in that of other workers
    try:
        return tuple(cover(model_types("causal"), discover({"VEOMNI_PLUGINS": "veomni-torch"})))
    finally:
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def page(models):
    return coverage_page(models, discover({"VEOMNI_PLUGINS": "veomni-torch"}), COMMAND)


@pytest.mark.docs
def test_the_page_has_every_type_in_its_place(models, page):
    before, _, missing = page.partition("## Not built")
    for model in models:
        assert f"`{model.model_type}`" in (missing if model.problem else before), model.model_type


@pytest.mark.docs
def test_the_readme_s_claim_about_coverage_is_the_page_s(page):
    claim = " ".join(README.read_text(encoding="utf-8").split())
    found = re.findall(r"^\| `(\w+)` \| (\d+) \| (\d+) \| (\d+) \|$", page, re.MULTILINE)
    types, proven, bound = ({op: counts[column] for op, *counts in found} for column in range(3))
    built, listed = re.search(r"(\d+) of (\d+) model types build", page).groups()
    assert f"{built} of {listed} causal model types build from their default configs" in claim
    assert f"proven in {proven['rms_norm']} of the {types['rms_norm']} types" in claim
    settled = re.search(r"proven or refused \| (\d+) \| (\d+) \|", page)
    assert settled.group(2) == types["rms_norm"]
    assert f"in {settled.group(1)} every norm, rotary embedding and gated MLP is proven or refused" in claim
    for op in ("cross_entropy_loss", "moe_experts"):
        assert f"{bound[op]} of {types[op]}" in claim


@pytest.mark.docs
def test_what_it_must_reach(models):
    built = [model for model in models if not model.problem]
    norms = [model for model in built if model.op("rms_norm")]
    assert len(norms) >= 112
    proven = [m for m in norms if all(op.proven == op.found for op in m.ops if op.op_name.startswith("rms_norm"))]
    assert len(proven) >= 110
    assert {claim.text: claim.reached for claim in claims(built)}[SETTLED] >= 108
    assert sum(op.bound == op.found for m in built if (op := m.op("cross_entropy_loss"))) >= 150
    assert sum(op.bound == op.found for m in built if (op := m.op("moe_experts"))) >= 50
    assert all(op.unproven or op.unexamined for m in built for op in m.ops if op.proven < op.found), (
        "a refusal without a reason"
    )


@pytest.mark.thorough
def test_finding_sites_takes_little_memory():
    source = """
import resource
from veomni_transformers.coverage import cover, model_types
from veomni_core.discovery.discover import discover
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, CONFIG_MAPPING
import torch
from veomni_core import find_sites
registry = discover({})
def grown(name, auto=AutoModelForCausalLM):
    with torch.device("meta"):
        model = auto.from_config(CONFIG_MAPPING[name]())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    find_sites(model, registry)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
grown("llama")
print(max(grown(name) for name in ("qwen3_moe", "deepseek_v3", "gpt_oss", "bert")))
# An image has thousands of positions.
print(max(grown(name, AutoModelForImageTextToText) for name in ("cohere2_vision", "qianfan_ocr", "llava_onevision")))
"""
    result = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    text, images = map(float, result.stdout.splitlines()[-2:])
    assert text < 100
    assert images < 300


SITES = """
    from veomni_core import SiteRule, hookimpl
    from veomni_transformers.proving import probe
    from veomni_core.sites.site import Site

    VEOMNI_PLUGIN_API_VERSION = 1

    class Locator:
        def find(self, model, rule):
            _, why = probe.attempt(lambda: model.no_such_part)
            yield Site("rms_norm_gated", "", rule, None, why)
            yield Site("rms_norm_gated", "model", rule, None, "sigmoid: 30% of elements differ")
            yield Site("rms_norm_gated", "lm_head", rule, None, "no input was seen", examined=False)
"""


def test_a_probe_that_fails_is_told_from_a_model_that_computes_something_else(monkeypatch):
    """A rule whose first site's probe raises, beside one that differs and one that could not be seen."""
    module = ModuleType("veomni_probing")
    exec(textwrap.dedent(SITES), vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    rule = SiteRule("probing", "veomni_probing:Locator")
    registry = build_registry([*definitions(), PluginRecord("p", "veomni-p", "1.0", "p", site_rules=(rule,))], {})
    (model,) = cover([("causal", "llama")], registry)
    op = model.op("rms_norm_gated")
    assert (op.found, op.refused) == (3, 1)
    assert op.unproven == ("LlamaModel: sigmoid: 30% of elements differ",)
    crashed = "LlamaForCausalLM: AttributeError: 'LlamaForCausalLM' object has no attribute 'no_such_part'"
    assert op.unexamined == ("Linear: no input was seen", crashed)
    refused, _, unexamined = coverage_page([model], registry, COMMAND).partition("## Not examined")
    assert "30% of elements differ" in refused and "30% of elements differ" not in unexamined
    assert "no_such_part" in unexamined and "no_such_part" not in refused


def test_an_unknown_selection_is_answered():
    with pytest.raises(UnknownNameError, match=r"'casual' is unknown\. Did you mean 'causal'"):
        model_types("casual")


def test_the_command_counts_what_binds(monkeypatch):
    monkeypatch.setattr("veomni_transformers.coverage.model_types", lambda selection: [("causal", "llama")])
    shown = CliRunner().invoke(build_app(), ["coverage"])
    assert shown.exit_code == 0 and "1 of 1 model types" in shown.stdout
    (model,) = json.loads(CliRunner().invoke(build_app(), ["coverage", "--json"]).stdout)["models"]
    assert model["model_type"] == "llama" and not model["problem"]


@pytest.mark.thorough
def test_of_every_type_that_builds_almost_nothing_is_only_declared_and_nothing_goes_unexamined():
    registry = discover({"VEOMNI_PLUGINS": "veomni-torch"})
    every = list(cover(model_types("all"), registry))
    text = coverage_page(every, registry, COMMAND)
    declared = {model.model_type: op.declared for model in every for op in model.ops if op.only_declared}
    assert sum(op.only_declared for model in every for op in model.ops) <= 5, declared
    shown = ("rms_norm", "rotary_pos_emb", "swiglu_mlp", "attention")
    unseen = {(m.model_type, op.unexamined) for m in every for op in m.ops if op.op_name.startswith(shown)}
    assert not {each for each in unseen if each[1]}
    assert "`attention of vision` |" in text and "`attention of audio` |" in text
    assert all(reason.partition(": ")[2][:40] in text for reasons in declared.values() for reason in reasons)


@pytest.mark.thorough
def test_the_command_covers_vision_language_models():
    command = [sys.executable, "-m", "veomni_core.cli", "coverage", "--transformers-models", "vlm", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    data = json.loads(result.stdout)
    assert {model["model_type"] for model in data["models"]} == {name for _, name in model_types("vlm")}
    assert data["summary"]["rms_norm"]["proven"] >= 68
    assert data["summary"]["rotary_pos_emb_vision"]["proven"] >= 28
    assert {claim["text"]: claim["reached"] for claim in data["claims"]}[SETTLED] >= 61
