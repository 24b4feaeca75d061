"""A whole job, its changes, and the text and models that it may name."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

from small_tokenizers import byte_level
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "vocab_size": 320,
}
JOB = {
    "model": {
        "config": {"model_type": "llama", **SIZES},
        "dtype": "float32",
        "ops_implementation": {"preset": "eager"},
    },
    "data": {"files": "text.txt", "sequence_length": 16},
    "train": {"output_dir": "run", "steps": 1, "batch_size": 2, "device": "cpu", "save_every": "never"},
}
REMOVED = object()


def changed(**values: Any) -> dict[str, Any]:
    """The job with other values, by dotted path (dots written as double underscores)."""
    job = deepcopy(JOB)
    for path, value in values.items():
        *sections, key = path.split("__")
        target = job
        for section in sections:
            target = target[section]
        if value is REMOVED:
            del target[key]
        else:
            target[key] = value
    return job


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class MineConfig(LlamaConfig):
    model_type = "mine_of_the_jobs"

class MineForCausalLM(LlamaForCausalLM):
    config_class = MineConfig
"""


def write_what_jobs_name(root: Path) -> None:
    """Write to ``root``: beside the jobs, text and models; in the working directory, a config."""
    jobs = root / "beside"
    for name in ("empty", "bare", "remote"):
        (jobs / name).mkdir(parents=True)
    (jobs / "text.txt").write_text("some text to train on; " * 20, encoding="utf-8")
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(jobs / "llama")
    (jobs / "bare" / "model.safetensors").write_bytes((jobs / "llama" / "model.safetensors").read_bytes())
    (jobs / "remote" / "mine.py").write_text(CODE, encoding="utf-8")
    classes = {"AutoConfig": "mine.MineConfig", "AutoModelForCausalLM": "mine.MineForCausalLM"}
    config = {"model_type": "mine_of_the_jobs", "auto_map": classes, **SIZES}
    (jobs / "remote" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    LlamaConfig(**SIZES).save_pretrained(root / "here")
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(jobs / "spoken")
    byte_level().save_pretrained(jobs / "spoken")
    LlamaForCausalLM(LlamaConfig(**{**SIZES, "vocab_size": 1000})).save_pretrained(jobs / "wide")
