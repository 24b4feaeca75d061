"""Kernels in VeOmni's registry: in VeOmni 0.1.12 with the transformers that it pins, and what needs no VeOmni here.

The files are those of bridges.md.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from foreign_trainings import blocks_of_page, error_of, run_scripts, write_files_of_page
from tiny_training import close

from veomni_bridges import veomni_registry
from veomni_core.errors import KernelUnavailableError

# VeOmni, the transformers that it pins, and what that needs.
VEOMNI = (
    *("veomni==0.1.12", "transformers==5.9.0", "huggingface_hub==1.9.0", "tokenizers==0.22.2", "kernels==0.12.3"),
    *("anyio", "distro", "h11", "httpcore", "httpx", "sniffio"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What came of each script."""
    folder = tmp_path_factory.mktemp("veomni")
    write_files_of_page(__file__, folder)
    (job,) = (each.text for each in blocks_of_page(__file__) if each.language == "yaml")
    (folder / "job.yaml").write_text(job, encoding="utf-8")
    ops = yaml.safe_load(job)["model"]["ops_implementation"]
    text = yaml.safe_dump({"model": {"ops_implementation": dict.fromkeys(ops, "eager")}})
    (folder / "eager.yaml").write_text(text, encoding="utf-8")
    tests = Path(__file__).parent
    training = str(tests / "veomni_training.py")
    asked = {
        "modules": ["veomni.models"],
        "bridge": "veomni_bridges.veomni_registry",
        "registries": [("veomni.ops.kernel_registry", "KERNEL_REGISTRY._specs")],
        "runs": {
            "bound": (training, ["bound", "job.yaml", "kernels.py"]),
            "eager": (training, ["eager", "eager.yaml"]),
            "refusals": (str(tests / "veomni_refusals.py"), []),
            "slots": (str(tests / "veomni_slots.py"), []),
        },
    }
    run_scripts(folder, asked, *VEOMNI)
    return folder


@pytest.mark.thorough
def test_the_losses_are_those_of_the_model_without_kernels(folder: Path) -> None:
    bound, eager = (json.loads((folder / f"{name}.json").read_text()) for name in ("bound", "eager"))
    assert len(bound) == 8 and close(bound, eager)
    assert bound != eager  # kernels add up in another order, so they did run


@pytest.mark.thorough
def test_each_slot_computes_the_variant_that_it_is_mapped_to(folder: Path) -> None:
    assert not (folder / "slots.error.json").exists(), error_of(folder, "slots")
    compared = {tuple(line.split()) for line in (folder / "slots.log").read_text().splitlines()}
    assert compared >= veomni_registry._SLOTS.keys()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("asked", "outcome"),
    [
        ("the same name again", "ValueError: Duplicate kernel registration"),
        ("a causal loss", "ValueError: Unknown cross_entropy_loss_implementation: 'veomni_core.chunk_loss'"),
        ("experts", "ValueError: Invalid fused_moe_kernel: 'veomni_core.acme'"),
        ("no such kernel", "Unknown kernel 'veomni_core.acme' for op='rms_norm'"),
        ("no rotation", "Unknown kernel 'veomni_core.torch' for op='rotary_pos_emb'"),
        ("another device", "RuntimeError: Kernel 'veomni_core.npu' for op='rms_norm' requires device_type='npu'"),
        ("no slot", "accepted"),
        *(
            (f"{op} on an NPU", f"ValueError: {op}_implementation='veomni_core.npu' is not supported on Ascend NPU")
            for op in ("rms_norm", "rotary_pos_emb", "swiglu_mlp", "load_balancing_loss")
        ),
    ],
)
def test_what_veomni_does_with_names_that_it_cannot_bind(folder: Path, asked: str, outcome: str) -> None:
    assert not (folder / "refusals.error.json").exists(), error_of(folder, "refusals")
    (line,) = (each for each in (folder / "refusals.log").read_text().splitlines() if each.startswith(f"{asked}: "))
    assert outcome in line


@pytest.mark.thorough
def test_importing_the_bridge_changes_nothing(folder: Path) -> None:
    assert json.loads((folder / "changed.json").read_text()) == []


def test_the_proposal_s_declaration_names_each_kernel_by_a_module_and_an_attribute() -> None:
    allowed = {"name", "op_name", "variant", "factory", "device_type", "description"}
    allowed |= {"min_compute_capability", "max_compute_capability"}
    declared = veomni_registry.VEOMNI_OPS_BACKENDS["kernels"]
    assert {(each["op_name"], each["variant"]) for each in declared} == veomni_registry._SLOTS.keys()
    for each in declared:
        assert each.keys() <= allowed and each["device_type"] in ("gpu", "npu", "any")
    by_name = {(each["op_name"], each["variant"], each["name"]): each for each in declared}
    norm = by_name["rms_norm", "standard", "veomni_core.torch"]
    module, _, attribute = norm["factory"].partition(":")
    assert module == veomni_registry.__name__
    x, weight = torch.randn(3, 8), torch.randn(8)
    rms = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    torch.testing.assert_close(getattr(veomni_registry, attribute)(x, weight, 1e-6), weight * (x * rms))


def test_a_kernel_that_this_machine_cannot_run_is_refused() -> None:
    with pytest.raises(KernelUnavailableError, match="rms_norm/standard:npu can't run here: needs device type npu"):
        _ = veomni_registry.rms_norm__standard__npu
    with pytest.raises(AttributeError, match="no attribute 'rms_norm__standard__acme'"):
        _ = veomni_registry.rms_norm__standard__acme
