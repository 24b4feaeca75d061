"""With the core, the ops and one kernel plugin alone, from wheels: no transformers is needed to list and to plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fresh_environment import ROOT, FreshEnvironment, build_wheel
from models import build
from veomni_core import make_plan

SOURCES = ("core", "plugins/ops", "plugins/liger")
JOB = "model: {config: {model_type: llama}, ops_implementation: {preset: eager, rms_norm_implementation: liger_kernel}}"
BIND = """
import sys
from torch import nn
from veomni_core import bind
try:
    bind(nn.Sequential(nn.RMSNorm(8)), {"preset": "auto"}, device="cpu")
except Exception as error:
    print(type(error).__name__, error)
print("transformers imported:", "transformers" in sys.modules)
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> FreshEnvironment:
    folder = tmp_path_factory.mktemp("wheels")
    wheels = [build_wheel(ROOT / source, folder) for source in SOURCES]
    environment = FreshEnvironment(folder / "environment")
    environment.link_requirements(wheels)
    environment.install(*wheels)
    return environment


def test_the_kernels_are_listed(environment: FreshEnvironment) -> None:
    listed = json.loads(environment.run("-m", "veomni_core.cli", "list", "--json"))
    assert {plugin["name"]: plugin["status"] for plugin in listed["plugins"]} == dict.fromkeys(
        ("veomni-core", "veomni-liger", "veomni-ops"), "loaded"
    )
    absent = environment.run("-c", "import transformers", check=False)
    assert "No module named 'transformers'" in absent


def test_given_sites_are_planned_for_named_hardware(environment: FreshEnvironment, tmp_path: Path) -> None:
    job, sites = tmp_path / "job.yaml", tmp_path / "plan.json"
    job.write_text(JOB, encoding="utf-8")
    sites.write_text(make_plan(build("llama"), {"preset": "eager"}, hardware="cpu").to_json(), encoding="utf-8")
    arguments = ("plan", str(job), "--sites", str(sites), "--hardware", "h200", "--json")
    plan = json.loads(environment.run("-m", "veomni_core.cli", *arguments))
    (norms,) = (op for op in plan["ops"] if op["op_name"] == "rms_norm")
    assert [site["kernel"] for site in norms["sites"]] == ["liger_kernel"] * 5
    told = environment.run("-m", "veomni_core.cli", "plan", str(job), "--hardware", "h200", check=False)
    assert "pip install veomni-transformers" in told and "use --sites" in told


def test_a_model_is_not_bound_to_nothing(environment: FreshEnvironment) -> None:
    printed = environment.run("-c", BIND)
    assert "BindingError no installed plugin finds ops in models" in printed
    assert "pip install veomni-transformers" in printed and "transformers imported: False" in printed
