"""The plugin of Axolotl in Axolotl itself, in the versions that it pins: the losses of the job without it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_training import close, llama
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from installed_beside import environment_with, installed_beside

pytestmark = pytest.mark.slow

# Axolotl, the versions that it pins, and what else its way to a training imports. Not its drivers and data stores.
AXOLOTL = (
    "axolotl==0.19.0",
    *("accelerate==1.13.0", "datasets==4.8.4", "huggingface_hub==1.17.0", "kernels==0.16.0", "peft==0.20.0"),
    *("tokenizers==0.23.1", "transformers==5.16.1", "trl==1.9.0"),
    *("addict", "anyio", "art", "axolotl-contribs-lgpl==0.0.7", "axolotl-contribs-mit==0.0.6", "colorama", "distro"),
    *("evaluate", "fastcore", "fire", "h11", "httpcore", "httpx", "kernels_data", "llvmlite", "numba"),
    *("opentelemetry-api", "posthog", "python-dotenv", "sniffio", "termcolor", "wandb"),
)
PAGE = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "axolotl.md"
ON_A_CPU = {"use_cpu": True, "bf16": False, "fp16": False, "dataset_prepared_path": "./prepared"}
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


def _page_s_job() -> dict[str, Any]:
    (block,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return {**yaml.safe_load(block), **ON_A_CPU}


def _without_kernels(job: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in job.items() if key not in ("plugins", "veomni")}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What came of each job, and the names that importing the bridge has changed."""
    folder = tmp_path_factory.mktemp("axolotl")
    letters = {chr(code): code for code in range(32, 64 + 32)}
    characters = Tokenizer(models.WordLevel({"<|endoftext|>": 0, **letters}, unk_token=" "))
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    llama(vocab_size=96).save_pretrained(folder / "base")
    special = {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    PreTrainedTokenizerFast(tokenizer_object=characters, **special).save_pretrained(folder / "base")
    rows = [{"text": f"THE QUICK BROWN FOX {number} JUMPS OVER THE LAZY DOG"} for number in range(64)]
    pairs = [{"prompt": f"THE QUICK {number} ", "chosen": "BROWN FOX", "rejected": "FOX THE"} for number in range(64)]
    for name, lines in (("data", rows), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")

    job = _page_s_job()
    kinds = {"page": job, "lora": {**job, **ADAPTER, **NO_LORA_KERNELS}, "dpo": {**job, **PAIRS}}
    jobs = {f"{kind} bound": each for kind, each in kinds.items()}
    jobs |= {f"{kind} eager": _without_kernels(each) for kind, each in kinds.items()}
    jobs["no config"] = {key: value for key, value in job.items() if key != "veomni"}
    jobs["misspelt"] = {**job, "veomni": {"rms_norm_implementation": "tirton"}}
    jobs["others' kernels"] = {**job, "chunked_cross_entropy": True, "tiled_mlp": True}
    jobs["Axolotl's choice for LoRA"] = {**job, **ADAPTER}
    jobs["a loss of TRL's"] = {**job, **PAIRS, "veomni": {"cross_entropy_loss_implementation": "chunk_loss"}}
    jobs = {name: {**each, "output_dir": f"./out/{name}"} for name, each in jobs.items()}
    (folder / "jobs.json").write_text(json.dumps(jobs), encoding="utf-8")
    offline = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "AXOLOTL_DO_NOT_TRACK": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("axolotl_jobs.py")), "jobs.json"],
        cwd=folder,
        env=environment_with(installed_beside(*AXOLOTL, dependencies=False), **offline),
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return {name: json.loads((folder / f"{name}.result.json").read_text()) for name in [*jobs, "changed"]}


@pytest.mark.parametrize("kind", ["page", "lora", "dpo"])
def test_the_losses_are_those_of_the_job_without_the_plugin(results: dict[str, Any], kind: str) -> None:
    bound, eager = results[f"{kind} bound"], results[f"{kind} eager"]
    assert len(bound["measured"]) == 8 and close(bound["measured"], eager["measured"])
    kernels = {op["op"]: op["chosen"] for op in bound["receipt"]["ops"]}
    assert kernels["rms_norm"] and kernels["rms_norm"] != ["eager"] and eager["receipt"] is None


def test_what_trl_computes_itself_is_said(results: dict[str, Any]) -> None:
    assert results["page bound"]["receipt"]["notes"] == []
    assert "TRL's trainer computes its loss" in results["dpo bound"]["receipt"]["notes"][0]


@pytest.mark.parametrize(
    ("job", "error", "message"),
    [
        ("no config", "ConfigError", "has no mapping under the key veomni"),
        ("misspelt", "UnknownNameError", "tirton"),
        ("others' kernels", "BindingError", "by chunked_cross_entropy: True, tiled_mlp: True. Set each to false"),
        ("Axolotl's choice for LoRA", "BindingError", "lora_mlp_kernel: True, lora_o_kernel: True"),
        ("a loss of TRL's", "ConfigError", "would never run: cross_entropy_loss_implementation: chunk_loss"),
    ],
)
def test_a_job_that_cannot_be_bound_is_refused(results: dict[str, Any], job: str, error: str, message: str) -> None:
    assert results[job]["error"] == error
    assert message in results[job]["message"]


def test_importing_the_bridge_changes_nothing_of_the_libraries(results: dict[str, Any]) -> None:
    assert results["changed"] == []
