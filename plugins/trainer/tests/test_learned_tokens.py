"""The loss is the mean over the learned tokens of a step, however they lie in micro-batches and on processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from jobs_on_ranks import Jobs, balance

pytest.importorskip("transformers.distributed.expert_parallel", reason="transformers shards models since 5.21")
pytestmark = pytest.mark.thorough

HELD_OUT = "data.validation_fraction=0.2"
STREAM = ("data.streaming=true", "data.shuffle_buffer=8")
SDPA = "model.ops_implementation={preset: eager, attn_implementation: sdpa}"

PACKED = ("data.packing=true", "data.sequence_length=44", SDPA)  # 56 sequences, so an epoch has only whole steps


def _pairs(path: Path) -> Path:
    """Pairs with completions of very different lengths; every fourth lies behind the cut and teaches nothing."""
    lines = []
    for number in range(100):
        prompt = "a prompt that is too long for the sequence" if number % 4 == 0 else f"say {number}:"
        lines.append(json.dumps({"prompt": prompt, "completion": " ha" * (1 + number * number % 7)}) + "\n")
    path.write_text("".join(lines), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """One process that accumulates four micro-batches, and two that accumulate two, with batches of one sequence."""
    jobs = Jobs(tmp_path_factory.mktemp("pairs"))
    data = (f"data.files={_pairs(jobs.root / 'pairs.jsonl')}", "train.batch_size=1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = ("train.gradient_accumulation=4",)
    jobs.alone("llama alone", "llama", *data, *alone, HELD_OUT)
    jobs.alone("moe alone", "moe", *data, *alone, balance(1))
    jobs.alone("stream alone", "llama", *data, *alone, *STREAM)
    jobs.alone("packed alone", "llama", *data, *alone, *PACKED)
    torch.set_num_threads(threads)
    two = (*data, "train.gradient_accumulation=2")
    errors = jobs.together(
        2,
        [
            jobs.case("llama, ddp", "llama", *two, HELD_OUT),
            jobs.case("moe, ddp", "moe", *two, balance(2)),
            jobs.case("moe, ep", "moe", *two, balance(2), "train.fsdp_size=2", "train.ep_size=2"),
            jobs.case("llama, tp", "llama", *data, *alone, "train.tp_size=2", HELD_OUT),
            jobs.case("llama, sp", "llama", *data, *alone, "train.sp_size=2", SDPA, HELD_OUT),
            jobs.case("stream, ddp", "llama", *two, *STREAM),
            jobs.case("stream, sp", "llama", *data, *alone, "train.sp_size=2", SDPA, *STREAM),
            jobs.case("packed, ddp", "llama", *two, *PACKED),
            jobs.case("packed, sp", "llama", *data, *alone, "train.sp_size=2", *PACKED),
        ],
    )
    assert not errors
    return jobs


@pytest.mark.parametrize("data", ["llama", "moe", "stream", "packed"])
def test_two_processes_learn_each_token_as_one_does(jobs: Jobs, data: str) -> None:
    found = [path.name for path in (jobs.root / "runs").iterdir() if path.name.startswith(f"{data}, ")]
    assert len(found) == {"llama": 3, "moe": 2, "stream": 2, "packed": 2}[data]
    for name in found:
        jobs.assert_same(name, f"{data} alone")
        rows = jobs.rows(name)
        assert len([row for row in rows if "validation_loss" in row]) == (data == "llama")
        assert all(row["loss"] > 0 for row in rows if "loss" in row)


def test_a_step_without_a_learned_token_has_no_loss(jobs: Jobs) -> None:
    path = jobs.root / "prompts.jsonl"
    lines = [json.dumps({"prompt": "a prompt that is too long for it", "completion": f" {n}"}) for n in range(8)]
    path.write_text("\n".join(lines), encoding="utf-8")
    jobs.alone("no labels", "llama", f"data.files={path}", "train.steps=2", "train.weight_decay=0")
    rows = jobs.rows("no labels")
    assert [(row["loss"], row["grad_norm"]) for row in rows] == [(0.0, 0.0)] * 2
