"""The loss for NeMo-AutoModel in its ``calculate_loss``, under FSDP2: the losses and parameters of its own loss.

Its recipe wants GPUs, and is not run: ``nemo_training.py`` does the steps that the recipe does with a loss.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from foreign_trainings import run_scripts

pytestmark = pytest.mark.thorough

RUNS = {
    "eager": ["model"],
    "bound": ["model", "bound"],
    "experts": ["experts"],
    "bound_experts": ["experts", "bound"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What came of each training."""
    folder = tmp_path_factory.mktemp("nemo_automodel")
    training = str(Path(__file__).with_name("nemo_training.py"))
    asked = {
        "modules": ["nemo_automodel.components.loss.utils", "nemo_automodel.components.loss.loss"],
        "bridge": "veomni_bridges.nemo_automodel",
        "registries": [("nemo_automodel.components.loss.loss", "LOSS_CONFIG_REGISTRY")],
        "runs": {name: (training, [name, *words]) for name, words in RUNS.items()},
    }
    run_scripts(folder, asked, "nemo_automodel==0.7.0")
    return folder


@pytest.mark.parametrize("bound, eager", [("bound", "eager"), ("bound_experts", "experts")])
def test_losses_and_parameters_are_those_of_its_own_loss(folder, bound, eager):
    found, wanted = (json.loads((folder / f"{name}.json").read_text(encoding="utf-8")) for name in (bound, eager))
    assert len(found) == 6 and found == pytest.approx(wanted, rel=1e-5)
    after, before = (torch.load(folder / f"{name}.pt") for name in (bound, eager))
    assert after.keys() == before.keys()
    for name, parameter in before.items():
        torch.testing.assert_close(after[name], parameter, rtol=1e-4, atol=1e-5)


def test_importing_the_module_changes_nothing(folder):
    assert json.loads((folder / "changed.json").read_text(encoding="utf-8")) == []
