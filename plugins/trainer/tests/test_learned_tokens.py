"""The loss is the mean over the learned tokens of a step, however they lie in micro-batches and on processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from jobs_on_ranks import BALANCE, Jobs

pytest.importorskip("transformers.distributed.expert_parallel", reason="transformers shards models since 5.21")

HELD_OUT = "data.validation_fraction=0.2"
STREAM = ("data.streaming=true", "data.shuffle_buffer=8")
SDPA = "model.ops_implementation={preset: eager, attn_implementation: sdpa}"
PACKED = ("data.packing=true", "data.sequence_length=44", SDPA)  # 56 sequences, so an epoch has only whole steps
# One process accumulates four micro-batches of one sequence. Two processes accumulate two where each has its own, and
# four where they share each sequence.
APART, SHARING = "train.gradient_accumulation=2", "train.gradient_accumulation=4"
SP = ("train.sp_size=2", SHARING)
CASES = {
    "llama": {"ddp": (APART, HELD_OUT), "tp": ("train.tp_size=2", SHARING, HELD_OUT), "sp": (*SP, SDPA, HELD_OUT)},
    "moe": {"ddp": (APART, BALANCE), "ep": (APART, BALANCE, "train.fsdp_size=2", "train.ep_size=2")},
    "stream": {"ddp": (APART, *STREAM), "sp": (*SP, SDPA, *STREAM)},
    "packed": {"ddp": (APART, *PACKED), "sp": (*SP, *PACKED)},
}
ALONE = {"llama": (HELD_OUT,), "moe": (BALANCE,), "stream": STREAM, "packed": PACKED}


def _pairs(path: Path) -> None:
    """Pairs with completions of very different lengths; every fourth lies behind the cut and teaches nothing."""
    lines = []
    for number in range(100):
        prompt = "a prompt that is too long for the sequence" if number % 4 == 0 else f"say {number}:"
        lines.append(json.dumps({"prompt": prompt, "completion": " ha" * (1 + number * number % 7)}) + "\n")
    path.write_text("".join(lines), encoding="utf-8")


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    jobs = Jobs(tmp_path_factory.mktemp("pairs"))
    _pairs(jobs.root / "pairs.jsonl")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield jobs
    torch.set_num_threads(threads)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["llama", "moe", "stream", "packed"])
def test_two_processes_learn_each_token_as_one_does(jobs: Jobs, kind: str) -> None:
    model = kind if kind == "moe" else "llama"
    data = (f"data.files={jobs.root / 'pairs.jsonl'}", "train.batch_size=1")
    jobs.alone(f"{kind} alone", model, *data, SHARING, *ALONE[kind])
    cases = [jobs.case(f"{kind}, {way}", model, *data, *changes) for way, changes in CASES[kind].items()]
    assert not jobs.together(2, cases)
    for way in CASES[kind]:
        jobs.assert_same(f"{kind}, {way}", f"{kind} alone")
        rows = jobs.rows(f"{kind}, {way}")
        assert len([row for row in rows if "validation_loss" in row]) == (kind == "llama")
        assert all(row["loss"] > 0 for row in rows if "loss" in row)


@pytest.mark.thorough
def test_a_step_without_a_learned_token_has_no_loss(jobs: Jobs) -> None:
    path = jobs.root / "prompts.jsonl"
    prompts = ["a prompt that is too long for the sequence" if number < 3 else "say" for number in range(8)]
    lines = [json.dumps({"prompt": prompt, "completion": f" {n}"}) for n, prompt in enumerate(prompts)]
    path.write_text("\n".join(lines), encoding="utf-8")
    jobs.alone("no labels", "llama", f"data.files={path}", "train.batch_size=1", "train.steps=8")
    rows = [row for row in jobs.rows("no labels") if "loss" in row]
    assert len(rows) == 8  # one epoch: each pair is a step of its own
    assert sum((row["loss"], row["grad_norm"]) == (0.0, 0.0) for row in rows) == 3
    assert sum(row["loss"] > 0 and row["grad_norm"] > 0 for row in rows) == 5
