"""The engine for verl in verl's own worker: the losses and the parameters of the worker without it.

The worker, its engine, FSDP2 on two ranks and the loss are verl's own. What stands in is ``verl_platform``, for a GPU,
and the rollouts, which are drawn at random. The files are those of bridges.md.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_trainings import error_of, run_scripts, save_model, write_files_of_page
from tiny_training import qwen3_moe

pytestmark = pytest.mark.thorough

# verl, and what its worker imports. Transformers is the one that is here, which is newer than verl asks for.
VERL = (
    "verl==0.9.1",
    *("aiohttp==3.14.5", "aiohappyeyeballs", "aiosignal", "annotated-doc", "antlr4-python3-runtime==4.9.3", "attrs"),
    *("cachetools", "cloudpickle", "codetiming", "fastapi==0.115.14", "frozenlist", "h11", "hydra-core==1.3.8"),
    *("importlib_metadata", "jsonschema", "jsonschema-specifications", "msgpack", "multidict", "omegaconf", "orjson"),
    *("propcache", "psutil", "pylatexenc", "pyvers", "pyzmq", "ray==2.60.0", "referencing", "rpds-py"),
    *("starlette==0.46.2", "tensordict==0.10.0", "torchdata==0.11.0", "uvicorn", "yarl", "zipp"),
)
RUNS = {
    "eager": ["model"],
    "bound": ["model", "bound"],
    "bf16": ["model", "bound", "bf16"],
    "packed": ["model", "packed"],
    "bound_packed": ["model", "bound", "packed"],
    "experts": ["experts"],
    "bound_experts": ["experts", "bound"],
    "liger": ["model", "bound", "liger"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What came of each training."""
    folder = tmp_path_factory.mktemp("verl")
    save_model(folder / "model")
    shutil.copytree(folder / "model", folder / "experts")  # for its tokenizer
    experts = qwen3_moe()
    experts.config.output_router_logits = False
    experts.save_pretrained(folder / "experts")
    write_files_of_page(__file__, folder)
    training = str(Path(__file__).with_name("verl_training.py"))
    modules = ("workers.engine_workers", "workers.engine.fsdp.transformer_impl", "workers.utils.losses")
    asked = {
        "modules": [
            "verl.plugin.platform",
            "verl_platform",
            *(f"verl.{each}" for each in modules),
            "verl.utils.torch_dtypes",
        ],
        "bridge": "veomni_bridges.verl",
        "registries": [("verl.workers.engine", "EngineRegistry._engines")],
        "runs": {name: (training, [name, *words]) for name, words in RUNS.items()},
    }
    run_scripts(folder, asked, *VERL, more=(folder,))
    return folder


def result(folder: Path, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return json.loads((folder / f"{name}.json").read_text(encoding="utf-8")), torch.load(folder / f"{name}.pt")


@pytest.mark.parametrize("bound, eager", [("bound", "eager"), ("bound_packed", "packed"), ("bound_experts", "experts")])
def test_losses_log_probabilities_and_parameters_are_those_of_verls_engine(folder, bound, eager):
    (found, after), (wanted, before) = result(folder, bound), result(folder, eager)
    assert (found["engine"], wanted["engine"]) == ("KernelEngine", "FSDPEngineWithLMHead")
    assert len(found["measured"]) == 6
    for one, other in zip(found["measured"], wanted["measured"], strict=True):
        assert one == pytest.approx(other, rel=1e-5, abs=1e-6)
    for one, other in zip(after["logprobs"], before["logprobs"], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-5)
    assert after["state"].keys() == before["state"].keys()
    for name, parameter in before["state"].items():
        torch.testing.assert_close(after["state"][name], parameter, rtol=1e-5, atol=1e-5)


def test_under_verls_autocast_the_losses_differ_by_rounding(folder):
    (found, _), (wanted, _) = result(folder, "bf16"), result(folder, "eager")
    for one, other in zip(found["measured"], wanted["measured"], strict=True):
        assert one == pytest.approx(other, rel=2e-2, abs=1e-3) and one != other


def test_the_model_runs_on_kernels_and_the_first_rank_says_which(folder):
    said = (folder / "bound_experts.log").read_text(encoding="utf-8")
    assert said.count("Bound on cpu") == 1
    assert all(kernel in said for kernel in ("chunk_logprobs", "grouped_mm"))


def test_settings_that_put_other_code_there_are_refused(folder):
    assert "BindingError: kernels can't be bound for this engine: use_liger replace" in error_of(folder, "liger")


def test_importing_the_module_changes_nothing(folder):
    assert json.loads((folder / "changed.json").read_text(encoding="utf-8")) == []
