"""Tiny jobs of two models, and the ways to run them: in this process, or several in one set of processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from sharded_jobs import Case, run_cases
from transformers import AutoConfig, AutoModelForCausalLM

from forked_processes import finish, fork_ranks
from veomni_trainer.job.load import load_job
from veomni_trainer.run.run_job import run_job

STEPS = 12
_TEXT = "the quick brown fox jumps over the lazy dog; " * 60
_LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": 320,
    "tie_word_embeddings": True,  # as small models have it: one weight under two names
}
_MOE = {
    **_LLAMA,
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "output_router_logits": True,
    "tie_word_embeddings": False,
}


# The router's loss is a mean over the micro-batches of a step, so its weight is the same under all sizes.
BALANCE = "model.config.router_aux_loss_coef=0.4"


class Jobs:
    """A job of each model, and the runs of them in one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "text").mkdir()
        (root / "text" / "a.txt").write_text(_TEXT, encoding="utf-8")
        (root / "text" / "b.txt").write_text(_TEXT.upper(), encoding="utf-8")
        for name, config in (("llama", _LLAMA), ("moe", _MOE)):
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).save_pretrained(root / name)
            model = {"config": config, "weights": str(root / name), "dtype": "float32"}
            train = {
                "output_dir": "unset",
                "steps": STEPS,
                "batch_size": 2,
                "learning_rate": 1e-3,
                "device": "cpu",
                "max_grad_norm": 0.5,  # below every step's norm, so that clipping shows in the curves
            }
            job = {
                "model": model | {"ops_implementation": {"preset": "eager"}},
                "data": {"files": str(root / "text"), "sequence_length": 32},
                "train": train,
            }
            (root / f"{name}.yaml").write_text(yaml.safe_dump(job), encoding="utf-8")

    def run(self, name: str) -> Path:
        """The folder of a run."""
        return self.root / "runs" / name

    def case(self, name: str, model: str, *changes: str, continues: str = "", **options: bool) -> Case:
        """The run ``name`` of a model's job; ``continues``: the checkpoint of another run, as ``RUN/checkpoint-N``."""
        sets = [f"train.output_dir={self.run(name)}", *changes]
        return Case(str(self.root / f"{model}.yaml"), sets, options, continues and str(self.run(continues)))

    def alone(self, name: str, model: str, *changes: str, **options: bool) -> None:
        """Run a job in this process."""
        case = self.case(name, model, *changes)
        run_job(load_job(Path(case.job), case.changes), **options)

    def together(self, processes: int, cases: list[Case]) -> dict[int, list[str]]:
        """Run cases on several processes; returns, by the case's number, the errors that ranks raised."""
        ranks = finish(fork_ranks(run_cases, cases, processes=processes), timeout=400)
        # All of them, since the one that fails leaves the others waiting, and their words say only that.
        ends = [
            f"rank {n}: {each.returncode}\n{each.stdout[-2000:]}{each.stderr[-4000:]}" for n, each in enumerate(ranks)
        ]
        assert not any(each.returncode for each in ranks), "\n".join(ends)
        errors: dict[int, list[str]] = {}
        for line in (line for rank in ranks for line in rank.stdout.splitlines()):
            if line.startswith('{"case"'):
                each = json.loads(line)
                errors.setdefault(each["case"], []).append(f"{each['error']}: {each['message']}")
        return errors

    def rows(self, name: str, file: str = "metrics") -> list[dict[str, Any]]:
        """The lines of a run's ``file.jsonl``."""
        text = (self.run(name) / f"{file}.jsonl").read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]

    def assert_same(self, name: str, other: str) -> None:
        """Both runs have the same losses and norms at every step."""
        found, wanted = self.rows(name), self.rows(other)
        assert len([row for row in wanted if "grad_norm" in row]) == STEPS
        for key in ("loss", "aux_loss", "grad_norm", "validation_loss"):
            values = [row[key] for row in wanted if key in row]
            assert [row[key] for row in found if key in row] == pytest.approx(values, rel=1e-6), (name, key)
