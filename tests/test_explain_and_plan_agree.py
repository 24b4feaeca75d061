"""``veomni explain`` says what a plan decides, for every kernel of the installed plugins."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from veomni_core import Site, discover, plan_sites
from veomni_core.cli.app import build_app

HARDWARE = ("cpu", "a100", "h200", "mi300x", "ascend-910b")


@pytest.fixture(scope="module")
def registry():
    return discover({})


def explained(op_name, hardware):
    result = CliRunner().invoke(build_app(), ["explain", op_name, "--hardware", hardware, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def planned(registry, hardware, op, variant, value):
    """What a plan decides at a site that suits every kernel of the variant."""
    site = Site(op.name, "module", "rule", variant, "proven")
    plan = plan_sites([site], {"preset": "eager", op.config_field: value}, registry=registry, hardware=hardware)
    (decision,) = (decision for each in plan.ops for decision in each.sites)
    return decision


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("hardware", HARDWARE)
def test_it_says_of_every_kernel_what_a_plan_decides(registry, hardware):
    seen = set()
    for op in registry.ops.values():
        said = explained(op.name, hardware)
        for row in said["kernels"]:
            decision = planned(registry, hardware, op, row["variant"], [row["kernel"], "eager"])
            assert decision.kernel == (row["kernel"] if row["runs"] else "eager"), row
            assert all(reason in decision.reason for reason in row["reasons"])
            seen.add((op.name, row["variant"], row["kernel"]))
        for variant in op.variants:
            assert said["auto"][variant] == planned(registry, hardware, op, variant, "auto").kernel
    assert seen == {spec.key for op in registry.ops for spec in registry.kernels(op)}
