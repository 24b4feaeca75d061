"""The jobs of the how-to pages train, with fewer steps and a tiny model in place of a published one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from veomni_trainer.job.load import parse_job
from veomni_trainer.run.run_job import run_job

pytestmark = pytest.mark.docs

PAGES = Path(__file__).resolve().parent.parent / "docs" / "how-to"


def job_of(page: str) -> dict[str, Any]:
    """The first job of a page."""
    text = (PAGES / page).read_text(encoding="utf-8")
    block = re.search(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert block
    return yaml.safe_load(block[1])


@pytest.fixture
def short(tmp_path: Path) -> dict[str, Any]:
    """What makes a page's job short: a small text, and few steps on the CPU."""
    (tmp_path / "text.txt").write_text("some text to train on; " * 400, encoding="utf-8")
    return {
        "data": {"files": str(tmp_path / "text.txt"), "sequence_length": 32},
        "train": {"output_dir": str(tmp_path / "run"), "steps": 5, "device": "cpu", "batch_size": 2},
    }


def trained(job: dict[str, Any], short: dict[str, Any]) -> Path:
    """The folder of the job's run."""
    job = {**job, **{section: job[section] | keys for section, keys in short.items()}}
    assert run_job(parse_job(job)) is False
    return Path(job["train"]["output_dir"])


def test_the_job_of_the_settings_page(short: dict[str, Any]) -> None:
    job = job_of("precision-and-optimizers.md")
    job["model"]["config"] |= {"hidden_size": 32, "intermediate_size": 64}
    job["train"]["schedule_options"]["num_decay_steps"] = 2
    short["data"]["validation_fraction"] = 0.05
    short["train"]["validate_every"] = 2
    run = trained(job, short)
    assert json.loads((run / "receipt.json").read_text(encoding="utf-8"))["autocast"] == "bfloat16"


def test_the_job_of_the_lora_page(short: dict[str, Any], tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    weights = str(tmp_path / "weights")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=64, **sizes)).save_pretrained(weights)
    words = {"<|endoftext|>": 0, "a": 1}
    letters = Tokenizer(models.BPE({**words, **{chr(c): c - 60 for c in range(98, 123)}, " ": 63, ";": 62}, []))
    letters.save(f"{weights}/tokenizer.json")
    job = job_of("lora.md")
    job["model"]["weights"] = weights
    short["data"]["tokenizer"] = weights
    run = trained(job, short)
    assert (run / "checkpoint-5" / "adapter_model.safetensors").exists()
    assert LlamaForCausalLM.from_pretrained(run / "model").dtype == torch.float32
