"""``veomni tune`` of the demo, as its user runs it: the best that was measured is what its plan then has."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from forked_processes import Forked, finish
from forked_workers import run_veomni_in_forks
from veomni_core.descriptions.kernel_spec import EAGER
from veomni_core.discovery.discover import discover
from veomni_tools.profiles.profile import Profile, best

ROOT = Path(__file__).resolve().parent.parent
DEMO = str(ROOT / "examples" / "demo.yaml")
SHORT = ("--set", "data.sequence_length=64", "--set", "train.batch_size=2")


@pytest.fixture
def veomni(tmp_path: Path) -> Any:
    """Runs a verb on the CPU, with a cache of its own, and reads the JSON that it prints."""
    alone = {"VEOMNI_CACHE": str(tmp_path), "CUDA_VISIBLE_DEVICES": "", "VEOMNI_PLUGINS": "veomni-torch,veomni-trainer"}

    def run(*arguments: str) -> Any:
        fork = Forked(run_veomni_in_forks, *arguments, "--json", environment={**os.environ, **alone}, folder=tmp_path)
        (done,) = finish([fork], timeout=600)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


@pytest.mark.thorough
def test_the_plan_of_the_demo_has_the_best_that_was_measured(veomni: Any) -> None:
    tuned = veomni("tune", DEMO, *SHORT, "--jobs", "2", "--seconds", "0.2")
    profile = Profile.from_json(json.dumps(tuned["measured"]))
    # A kernel on request is measured beside the others, and auto doesn't take it, however fast it was.
    registry, able = discover(), {}
    for site in profile.sites:
        auto = {EAGER, *(spec.name for spec in registry.kernels(site.kind.op_name) if spec.preference > 0)}
        able[site.kind] = [each for each in site.measured if each.kernel in auto]
    wanted = {str(kind): best(contenders).kernel for kind, contenders in able.items() if contenders}
    assert {"moe_experts/standard at model.layers.*.mlp.experts", "cross_entropy_loss/causal at the model"} <= {*wanted}
    assert {where: kernel for where, kernel in tuned["chosen"].items() if kernel} == wanted
    assert all("x as fast as " in says or "within the spread of " in says for says in map(tuned["says"].get, wanted))
    plan = veomni("plan", DEMO, *SHORT)
    assert plan["profile"] == profile.digest == tuned["digest"]
    decided = [site for op in plan["ops"] for site in op["sites"] if "chosen by measurement" in site["reason"]]
    assert len(decided) == sum(site.sites for site in profile.sites if site.measured)
    for site in decided:
        path = ".".join("*" if part.isdigit() else part for part in site["site"]["path"].split("."))
        kind = f"{site['site']['op_name']}/{site['site']['variant']} at {path or 'the model'}"
        assert site["kernel"] == wanted[kind]
    other = veomni("plan", DEMO)
    assert other["profile"] == "" and "not measured for 8 x 256 tokens on cpu (CPU), but for 2 x 64" in json.dumps(
        other
    )
