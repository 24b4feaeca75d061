"""The plugin of Axolotl in Axolotl itself, in the versions that it pins: the losses of the job without it.

The files are those of bridges.md.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from foreign_trainings import blocks_of_page, error_of, measured, run_scripts, save_model, write_lines
from tiny_training import close

pytestmark = pytest.mark.thorough

# Axolotl, the versions that it pins, and what else its way to a training imports. Not its drivers and data stores.
AXOLOTL = (
    "axolotl==0.19.0",
    *("accelerate==1.13.0", "datasets==4.8.4", "huggingface_hub==1.17.0", "kernels==0.16.0", "peft==0.20.0"),
    *("tokenizers==0.23.1", "transformers==5.16.1", "trl==1.9.0"),
    *("addict", "anyio", "art", "axolotl-contribs-lgpl==0.0.7", "axolotl-contribs-mit==0.0.6", "colorama", "distro"),
    *("evaluate", "fastcore", "fire", "h11", "httpcore", "httpx", "kernels_data", "llvmlite", "numba"),
    *("opentelemetry-api", "posthog", "python-dotenv", "sniffio", "termcolor", "wandb"),
)
# Guarded, since Axolotl tokenises in processes that import the script again.
TRAIN = """\
import sys

from axolotl.cli.train import do_cli

if __name__ == "__main__":
    do_cli(sys.argv[1])
"""
# Without a seed Axolotl draws one, and with it the order of the rows.
ON_A_CPU = {"use_cpu": True, "bf16": False, "fp16": False, "dataset_prepared_path": "./prepared", "seed": 7}
ADAPTER = {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_linear": True}
NO_LORA_KERNELS = {f"lora_{part}_kernel": False for part in ("mlp", "qkv", "o", "embedding")}
PAIRS = {
    "rl": "dpo",
    "datasets": [
        {
            "path": "./pairs.jsonl",
            "ds_type": "json",
            "split": "train",
            "type": {
                **{f"field_{column}": column for column in ("prompt", "chosen", "rejected")},
                **{f"{column}_format": f"{{{column}}}" for column in ("prompt", "chosen", "rejected")},
            },
        }
    ],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where each job was run."""
    folder = tmp_path_factory.mktemp("axolotl")
    save_model(folder / "base")
    (folder / "train.py").write_text(TRAIN, encoding="utf-8")
    write_lines(folder / "data.jsonl", [{"text": f"the quick brown fox {number} jumps"} for number in range(64)])
    pairs = [{"prompt": f"the quick {number} ", "chosen": "brown fox", "rejected": "fox the"} for number in range(64)]
    write_lines(folder / "pairs.jsonl", pairs)

    (written,) = (each.text for each in blocks_of_page(__file__) if each.language == "yaml")
    job = {**yaml.safe_load(written), **ON_A_CPU}
    kinds = {"page": job, "lora": {**job, **ADAPTER, **NO_LORA_KERNELS}, "dpo": {**job, **PAIRS}}
    jobs = {f"{kind} bound": each for kind, each in kinds.items()}
    for kind, each in kinds.items():
        jobs[f"{kind} eager"] = {key: value for key, value in each.items() if key not in ("plugins", "veomni")}
    jobs["no config"] = {key: value for key, value in job.items() if key != "veomni"}
    jobs["misspelt"] = {**job, "veomni": {"rms_norm_implementation": "tirton"}}
    jobs["others' kernels"] = {**job, "chunked_cross_entropy": True, "tiled_mlp": True}
    jobs["hub kernels"] = {**job, "use_kernels": True}
    jobs["Axolotl's choice for LoRA"] = {**job, **ADAPTER}
    jobs["a loss of TRL's"] = {**job, **PAIRS, "veomni": {"cross_entropy_loss_implementation": "chunk_loss"}}
    for name, each in jobs.items():
        text = yaml.safe_dump({**each, "output_dir": f"./out/{name}"})
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    asked = {
        "modules": ["axolotl.cli.train", "axolotl.core.builders", "axolotl.train"],
        "bridge": "veomni_bridges.axolotl",
        "registries": [],
        "runs": {name: ("train.py", [f"{name}.yaml"]) for name in jobs},
    }
    run_scripts(folder, asked, *AXOLOTL)
    return folder


def receipt(folder: Path, job: str) -> dict[str, Any]:
    return json.loads((folder / "out" / job / "veomni_receipt.json").read_text(encoding="utf-8"))


def steps(folder: Path, job: str) -> list[float]:
    state = folder / "out" / job / "checkpoint-4" / "trainer_state.json"
    return measured(json.loads(state.read_text(encoding="utf-8"))["log_history"])


@pytest.mark.parametrize("kind", ["page", "lora", "dpo"])
def test_the_losses_are_those_of_the_job_without_the_plugin(folder: Path, kind: str) -> None:
    bound, eager = steps(folder, f"{kind} bound"), steps(folder, f"{kind} eager")
    assert len(bound) == 8 and close(bound, eager)
    chosen = {op["op"]: op["chosen"] for op in receipt(folder, f"{kind} bound")["ops"]}
    assert chosen["rms_norm"] and chosen["rms_norm"] != ["eager"]
    assert not (folder / "out" / f"{kind} eager" / "veomni_receipt.json").exists()


def test_what_trl_computes_itself_is_said(folder: Path) -> None:
    assert receipt(folder, "page bound")["notes"] == []
    assert "TRL's trainer computes its loss" in receipt(folder, "dpo bound")["notes"][0]


@pytest.mark.parametrize(
    ("job", "error", "message"),
    [
        ("no config", "ConfigError", "has no mapping under the key veomni"),
        ("misspelt", "UnknownNameError", "tirton"),
        ("others' kernels", "BindingError", "by chunked_cross_entropy: True, tiled_mlp: True. Set each to false"),
        ("hub kernels", "BindingError", "by use_kernels: True. Set each to false"),
        ("Axolotl's choice for LoRA", "BindingError", "lora_mlp_kernel: True, lora_o_kernel: True"),
        ("a loss of TRL's", "ConfigError", "would never run: cross_entropy_loss_implementation: chunk_loss"),
    ],
)
def test_a_job_that_cannot_be_bound_is_refused(folder: Path, job: str, error: str, message: str) -> None:
    said = error_of(folder, job)
    assert said.startswith(f"{error}: ") and message in said


def test_importing_the_bridge_changes_nothing_of_the_libraries(folder: Path) -> None:
    assert json.loads((folder / "changed.json").read_text(encoding="utf-8")) == []
