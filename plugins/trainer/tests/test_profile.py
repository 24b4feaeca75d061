"""``train.profile``, and the arithmetic that a run's speed is measured in."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_configs import LLAMA, QWEN3_MOE
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from veomni_trainer.loop.measures import Throughput, peak_of
from veomni_trainer.report.progress import describe, shown

Train = Callable[..., bool]
Losses = Callable[[Path], list[tuple[int, float]]]


def test_a_few_steps_are_recorded_and_the_rest_trains_the_same(
    job_data: dict[str, Any], train: Train, losses: Losses, run: Path
) -> None:
    job_data["train"] |= {"steps": 4, "save_every": "never"}
    train(job_data)
    without = losses(run)
    job_data["train"]["profile"] = {"steps": 2, "wait": 1}
    train(job_data, overwrite=True)
    assert losses(run) == without
    with gzip.open(run / "profile" / "trace.json.gz", "rt") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert "module: model.layers.*.mlp.down_proj" in names
    table = json.loads((run / "profile" / "table.json").read_text(encoding="utf-8"))
    assert table["steps"] == 2 and 0 <= table["idle_share"] < 1
    calls = {row["name"]: row["calls"] for part in ("ops", "modules") for row in table[part]}
    assert "aten::mm" in calls and calls["model.layers.*.self_attn"] == LLAMA["num_hidden_layers"]
    assert "where the time of 2 steps went" in (run / "report.html").read_text(encoding="utf-8")
    train(job_data, "train.profile=null", overwrite=True)
    assert not (run / "profile").exists()


@pytest.mark.parametrize(
    "config", [LLAMA, QWEN3_MOE, {**LLAMA, "tie_word_embeddings": True}], ids=["llama", "moe", "tied"]
)
def test_operations_are_those_that_torch_counts(config: dict[str, Any]) -> None:
    length = 16
    made = AutoConfig.for_model(**config, vocab_size=320, hidden_act="silu")
    own = {"attn_implementation": "eager"}  # torch counts neither fused attention nor grouped products
    own |= {"experts_implementation": "eager"} if "num_experts" in config else {}
    model = AutoModelForCausalLM.from_config(made, dtype=torch.float32, **own)
    ids = torch.randint(320, (1, length), generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    measured = Throughput(model, peak=100.0, processes=1, packs=False)
    measured.count(length, length)
    row = measured.read(1.0)
    assert row["tflops"] * 1e12 == pytest.approx(counter.get_total_flops(), rel=0.02)
    assert row["mfu"] == pytest.approx(row["tflops"] / 100)
    assert measured.read(1.0)["tflops"] == 0


def test_frozen_weights_need_no_gradients_of_their_own() -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA, vocab_size=320))
    read = []
    for trained in (True, False):
        model.requires_grad_(trained)
        measured = Throughput(model, peak=1.0, processes=2, packs=True)
        measured.count(8, 8)
        read.append(measured.read(1.0)["tflops"])
    assert read[1] == pytest.approx(read[0] * 4 / 6)


def test_a_device_without_a_known_peak_has_no_mfu() -> None:
    assert peak_of(torch.device("cpu"), "bfloat16") is None
    row = {"loss": 1.0, "tokens_per_second": 10.0, "peak_memory_bytes": 1e9}
    assert "TFLOP/s" not in describe(row)
    fast = {**row, "tokens_per_second_each": 5.0, "tflops": 400.0, "mfu": 0.404}
    assert "10 tok/s (5 each)  400 TFLOP/s (40% MFU)" in describe(fast)
    assert describe({**row, "reward": 0.25, "kl": 0.001}).startswith("loss 1.0000  reward 0.25  KL 0.001")
    assert shown({"accuracy": 1.0, "margin": 2.5}) == "accuracy 1  margin 2.5"
