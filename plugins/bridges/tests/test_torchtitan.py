"""Overrides of torchtitan's configs, applied to its own Llama: the losses of the model without them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from foreign_trainings import error_of, run_scripts
from tiny_training import close

pytestmark = pytest.mark.thorough

TORCHTITAN = (
    *("torchtitan==0.3.0", "spmd_types==0.2.3", "torchdata==0.11.0", "torch_checkpointing"),
    *("docstring-parser", "shtab", "typeguard", "tyro"),
)
OVERRIDES = "veomni_bridges.torchtitan"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What came of each training."""
    folder = tmp_path_factory.mktemp("torchtitan")
    training = str(Path(__file__).with_name("torchtitan_training.py"))
    both = [f"{OVERRIDES}.rms_norm", f'{OVERRIDES}.swiglu={{"kernel": "torch"}}']
    runs = {
        "eager": [],
        "bound": both,
        "proven": ["bind"],
        "misspelt": [f'{OVERRIDES}.rms_norm={{"kernel": "tirton"}}'],
        "elsewhere": [f'{OVERRIDES}.rms_norm={{"kernel": "triton"}}'],
    }
    asked = {
        "modules": ["torchtitan.models.llama3"],
        "bridge": OVERRIDES,
        "registries": [],
        "runs": {name: (training, [name, *overrides]) for name, overrides in runs.items()},
    }
    run_scripts(folder, asked, *TORCHTITAN)
    return folder


def result(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))


def test_the_losses_are_those_of_the_model_without_overrides(folder: Path) -> None:
    bound, eager = result(folder, "bound"), result(folder, "eager")
    assert len(bound["measured"]) == 8 and close(bound["measured"], eager["measured"])
    assert {"KernelRMSNorm", "KernelFeedForward"} <= {*bound["classes"]}
    assert not {"RMSNorm", "FeedForward"} & {*bound["classes"]}
    assert bound["state"] == eager["state"]


def test_bind_proves_and_binds_every_norm_and_mlp_of_its_llama(folder: Path) -> None:
    proven, eager = result(folder, "proven"), result(folder, "eager")
    assert (proven["bound"]["rms_norm"], proven["bound"]["swiglu_mlp"]) == (13, 6)
    assert close(proven["measured"], eager["measured"]) and proven["state"] == eager["state"]


def test_which_kernel_runs_is_said_once(folder: Path) -> None:
    said = (folder / "bound.log").read_text(encoding="utf-8").splitlines()
    kernels = sorted(line.partition(" runs on ")[2].partition(",")[0] for line in said if " runs on " in line)
    assert kernels == ["rms_norm/cast_after:torch", "swiglu_mlp/standard:torch"]


def test_a_kernel_that_is_unknown_or_cannot_run_here_is_refused(folder: Path) -> None:
    assert error_of(folder, "misspelt").startswith("UnknownNameError: ") and "tirton" in error_of(folder, "misspelt")
    assert "rms_norm/cast_after:triton can't run here" in error_of(folder, "elsewhere")


def test_importing_the_module_adds_its_overrides_and_changes_nothing_else(folder: Path) -> None:
    assert json.loads((folder / "changed.json").read_text(encoding="utf-8")) == []
