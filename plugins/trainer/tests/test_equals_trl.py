"""A job of a method computes what TRL's, or transformers', trainer computes that is set up by hand: the same losses."""

from __future__ import annotations

import importlib.util
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
import yaml
from datasets import Dataset
from post_training import needs_examples
from tiny_configs import QWEN3_MOE
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    set_seed,
)

pytestmark = needs_examples
Go = Callable[..., bool]

STEPS, FEW = 50, 4
ARGUMENTS: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-3,
    "weight_decay": 0.1,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0,
    "seed": 0,
    "data_seed": 0,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": "none",
    "save_strategy": "no",
    "logging_steps": 1,
    "disable_tqdm": True,
    "dataloader_drop_last": True,
}
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

TRAINERS: dict[str, tuple[Any, Any, str, dict[str, Any]]] = {  # the trainer, its config, its data, and its settings
    "sft": (trl.SFTTrainer, trl.SFTConfig, "chats", {"max_length": 64, "assistant_only_loss": True}),
    "dpo": (trl.DPOTrainer, trl.DPOConfig, "pairs", {"max_length": 96}),
    "kto": (trl.KTOTrainer, trl.KTOConfig, "verdicts", {"max_length": 96}),
    "orpo": (ORPOTrainer, ORPOConfig, "pairs", {"max_length": 96}),
    "reward": (trl.RewardTrainer, trl.RewardConfig, "pairs", {"max_length": 96}),
    "grpo": (trl.GRPOTrainer, trl.GRPOConfig, "prompts", {"max_completion_length": 16, "num_generations": 4}),
    "rloo": (trl.RLOOTrainer, trl.RLOOConfig, "prompts", {"max_completion_length": 16, "num_generations": 4}),
    "classify": (Trainer, TrainingArguments, "labels", {}),
}


def watched(kind: Any, losses: list[float]) -> Any:
    """``kind``, with the loss of each of its micro-steps added to that of the step."""

    class ByHand(kind):  # type: ignore[misc]
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss: torch.Tensor = super().training_step(*args, **kwargs)
            if self.state.global_step == len(losses):
                losses.append(0.0)
            losses[-1] += float(loss)
            return loss

    return ByHand


def rows(here: Path, folder: str) -> Dataset:
    lines = (here / folder / "capitals.jsonl").read_text(encoding="utf-8").splitlines()
    return Dataset.from_list([json.loads(line) for line in lines])


def model_of(config: dict[str, Any], method: str, words: int) -> Any:
    set_seed(0)
    made = AutoConfig.for_model(**config, vocab_size=words)
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    if method not in ("reward", "classify"):
        return AutoModelForCausalLM.from_config(made, **options)
    made.num_labels = 1 if method == "reward" else 2
    return AutoModelForSequenceClassification.from_config(made, **options)


def by_hand(here: Path, method: str, steps: int, accumulation: int, config: dict[str, Any], words: int) -> list[float]:
    """The losses of the library's own trainer."""
    trainer, arguments, folder, settings = TRAINERS[method]
    if method in ("grpo", "rloo"):
        settings = settings | {"beta": 0.0}
    tokenizer = AutoTokenizer.from_pretrained(here / "tokenizer")
    data, given = rows(here, folder), {}
    model = model_of(config, method, words)
    if method in ("dpo", "kto"):
        given["ref_model"] = model_of(config, method, words)
    if method == "kto":
        data = data.shuffle(seed=0)
    if method in ("grpo", "rloo"):
        spec = importlib.util.spec_from_file_location("rewards", here / "rewards.py")
        assert spec and spec.loader
        rewards = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(rewards)
        given["reward_funcs"] = [rewards.contains_answer, rewards.brevity]
    if method == "classify":
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        model.config.pad_token_id = tokenizer.pad_token_id
        names = ["answer", "question"]
        data = data.map(
            lambda row: {"input_ids": tokenizer(row["text"])["input_ids"], "labels": names.index(row["label"])},
            remove_columns=["text", "label"],
        )
        given["data_collator"] = DataCollatorWithPadding(tokenizer)
    else:
        given["processing_class"] = tokenizer
    sizes = {"max_steps": steps, "gradient_accumulation_steps": accumulation}
    made = arguments(str(here / "hand"), **ARGUMENTS | sizes | settings)
    losses: list[float] = []
    watched(trainer, losses)(model=model, args=made, train_dataset=data, **given).train()
    return losses


def _few_and_many() -> list[Any]:
    few = [pytest.param(each, FEW, 1, id=f"{each}-{FEW}") for each in TRAINERS]
    # transformers 5.23 doesn't divide the classifiers' loss by the micro-steps; a job does.
    times = {each: 1 if each == "classify" else 2 for each in TRAINERS}
    many = [pytest.param(each, STEPS, times[each], id=f"{each}-{STEPS}", marks=pytest.mark.thorough) for each in times]
    return few + many


def test_accumulated_classes_are_learned_as_in_one_batch(here: Path, go: Go) -> None:
    curves = []
    for batch, times in ((4, 2), (8, 1)):
        changes = (f"train.batch_size={batch}", f"train.gradient_accumulation={times}", "train.steps=3")
        go("classify", *changes, "train.export=false", "train.save_every=never", overwrite=True)
        lines = (here / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        curves.append([json.loads(line)["loss"] for line in lines])
    assert curves[0] == pytest.approx(curves[1], rel=1e-5)


@pytest.mark.parametrize(("method", "steps", "accumulation"), _few_and_many())
def test_a_job_has_the_losses_of_the_librarys_trainer(
    here: Path, go: Go, method: str, steps: int, accumulation: int
) -> None:
    compare(here, go, method, steps, accumulation)


def compare(here: Path, go: Go, method: str, steps: int, accumulation: int, *more: str) -> list[dict[str, Any]]:
    """The rows of the job's metrics, whose losses are compared with those of the library's trainer."""
    changes = [f"train.steps={steps}", f"train.gradient_accumulation={accumulation}", "train.batch_size=4", *more]
    changes += ["model.ops_implementation={preset: eager}", "train.export=false", "train.save_every=never"]
    if method in ("grpo", "rloo"):
        changes.append(f"train.{method}.beta=0")
    go(method, *changes)
    lines = (here / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines]
    job = yaml.safe_load((here / "run" / "job.yaml").read_text(encoding="utf-8"))
    expected = by_hand(here, method, steps, accumulation, job["model"]["config"], 320)
    assert len(expected) == steps
    assert [row["loss"] for row in found] == pytest.approx(expected, rel=1e-5, abs=1e-7)
    return found


EXPERTS = [pytest.param(each, marks=pytest.mark.thorough) for each in TRAINERS if each not in ("sft", "classify")]


@pytest.mark.parametrize("method", ["sft", *EXPERTS])
def test_a_mixture_of_experts_learns_the_routers_loss_as_in_trl(here: Path, go: Go, method: str) -> None:
    """TRL adds it at the config's coefficient, if the config outputs none too. ORPO doesn't, and a score has none."""
    config = {**QWEN3_MOE, "max_position_embeddings": 128, "router_aux_loss_coef": 0.1, "output_router_logits": False}
    found = compare(here, go, method, 30, 2, f"model.config={json.dumps(config)}")
    assert method in ("orpo", "reward") or all(row["aux_loss"] > 1 for row in found)


@pytest.mark.thorough
def test_prompts_of_unequal_lengths_are_completed_where_routers_are_output(here: Path, go: Go) -> None:
    config = {**QWEN3_MOE, "max_position_embeddings": 128}
    go("grpo", f"model.config={json.dumps(config)}", "train.steps=2", "train.gradient_accumulation=2")
    saved = json.loads((here / "run" / "checkpoint-2" / "config.json").read_text(encoding="utf-8"))
    assert config["output_router_logits"] and saved["output_router_logits"]
