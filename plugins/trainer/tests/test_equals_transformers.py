"""A job computes what transformers' ``Trainer`` computes that is set up by hand: the same losses over 50 steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, Trainer, TrainingArguments, set_seed

from veomni_trainer.data.corpus import read_corpus
from veomni_trainer.job.load import parse_job
from veomni_trainer.setup.model import job_tokenizer

Train = Callable[..., bool]
Losses = Callable[[Path], list[tuple[int, float]]]

STEPS = 50
# What both are told, where a case says nothing else.
ARGUMENTS: dict[str, Any] = {
    "max_steps": STEPS,
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-3,
    "weight_decay": 0.1,
    "lr_scheduler_type": "cosine",
    "seed": 0,
    "data_seed": 0,
    "use_cpu": True,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "dataloader_drop_last": True,
}


class ByHand(Trainer):
    """transformers' ``Trainer``, which logs rounded losses, with those of its steps."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.losses: dict[int, float] = {}

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        step = self.state.global_step + 1
        self.losses[step] = self.losses.get(step, 0.0) + float(loss)
        return loss


def groups_by_hand(model: PreTrainedModel) -> torch.optim.Optimizer:
    """AdamW with the weights of norms slower and undecayed, and the embeddings undecayed."""
    norms = [p for name, p in model.named_parameters() if "norm" in name]
    tables = [p for name, p in model.named_parameters() if "embed_tokens" in name]
    special = {id(p) for p in [*norms, *tables]}
    groups = [
        {"params": [p for p in model.parameters() if id(p) not in special], "weight_decay": 0.1},
        {"params": norms, "weight_decay": 0.0, "lr": 1e-4},
        {"params": tables, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True)


GROUPS = [
    {"match": "*norm.weight", "learning_rate": 1e-4},
    {"match": "*embed_tokens*", "weight_decay": 0.0},
    {"match": "*.*", "weight_decay": 0.1},
]
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # the keys of `train`, and transformers' arguments
    "cosine and float32, as by default": ({}, {}),
    "linear after a warm-up": (
        {"schedule": "linear", "warmup": 0.1},
        {"lr_scheduler_type": "linear", "warmup_steps": 5},
    ),
    "a schedule with options": (
        {"schedule": "warmup_stable_decay", "schedule_options": {"num_decay_steps": 20}, "warmup": 5},
        {
            "lr_scheduler_type": "warmup_stable_decay",
            "lr_scheduler_kwargs": {"num_decay_steps": 20},
            "warmup_steps": 5,
        },
    ),
    "accumulation": ({"gradient_accumulation": 2}, {"gradient_accumulation_steps": 2}),
    "bfloat16 autocast": ({"precision": "bf16_mixed"}, {"bf16": True}),
    "no clipping, with a rate at which that matters": (
        {"max_grad_norm": None, "learning_rate": 0.02},
        {"max_grad_norm": 0.0, "learning_rate": 0.02},
    ),
    "another optimizer": ({"optimizer": "adafactor"}, {"optim": "adafactor"}),
    "groups of parameters": (
        {"optimizer": {"name": "adamw_torch_fused", "betas": [0.9, 0.95]}, "parameter_groups": GROUPS},
        {},
    ),
}
IN_MAKE_TEST = ("accumulation", "cosine and float32, as by default")


def losses_by_hand(
    job_data: dict[str, Any],
    model: Any,
    arguments: dict[str, Any],
    folder: Path,
    optimizer: torch.optim.Optimizer | None = None,
) -> dict[int, float]:
    """The losses of a ``Trainer`` by hand on the sequences of the job."""
    job = parse_job(job_data, folder=folder)
    hand = ByHand(
        model,
        TrainingArguments(str(folder / "hand"), **ARGUMENTS | arguments),
        train_dataset=read_corpus(job.data, job_tokenizer(job)).training,
        optimizers=(optimizer, None),
    )
    hand.train()
    assert len(hand.losses) == STEPS and hand.losses[STEPS] < hand.losses[1]
    return hand.losses


def _marked(case: str) -> Any:
    return pytest.param(case, marks=[] if case in IN_MAKE_TEST else [pytest.mark.thorough])


@pytest.mark.parametrize("case", map(_marked, CASES))
def test_a_job_has_the_losses_of_a_trainer_by_hand(
    job_data: dict[str, Any], train: Train, losses: Losses, run: Path, tmp_path: Path, case: str
) -> None:
    keys, arguments = CASES[case]
    job_data["train"] |= {"steps": STEPS, "save_every": "never"} | keys
    set_seed(0)
    config = AutoConfig.for_model(**job_data["model"]["config"], vocab_size=320)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    optimizer = groups_by_hand(model) if case == "groups of parameters" else None
    expected = losses_by_hand(job_data, model, arguments, tmp_path, optimizer)
    train(job_data)
    assert dict(losses(run)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("precision", ["float32", pytest.param("bf16_mixed", marks=pytest.mark.thorough)])
def test_a_lora_job_has_the_losses_of_peft_by_hand(
    lora_data: dict[str, Any], train: Train, losses: Losses, run: Path, tmp_path: Path, precision: str
) -> None:
    lora_data["train"] |= {"steps": STEPS, "save_every": "never", "precision": precision}
    lora_data["lora"] |= {"dropout": 0.1}
    arguments: dict[str, Any] = {"learning_rate": 0.01}
    if precision == "bf16_mixed":
        lora_data["model"]["dtype"] = "bfloat16"  # of the frozen weights
        arguments["bf16"] = True
    model = AutoModelForCausalLM.from_pretrained(
        lora_data["model"]["weights"],
        dtype=lora_data["model"].get("dtype", "float32"),
        attn_implementation="eager",
    )
    set_seed(0)
    config = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules="all-linear", task_type="CAUSAL_LM")
    expected = losses_by_hand(lora_data, get_peft_model(model, config), arguments, tmp_path)
    train(lora_data)
    assert dict(losses(run)) == pytest.approx(expected, rel=1e-6)
