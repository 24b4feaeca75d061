"""Fifty steps of TRL's trainers, bound and unbound: the same losses, metrics and gradients in every step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny_training import AUTO, llama, qwen3_moe
from torch import Tensor
from transformers import TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from trl_data import PAIRS, PROMPTS, QUICK, TEXTS, make_tokenizer

from veomni_bridges.trl import VeOmniCallback

pytestmark = pytest.mark.thorough

STEPS = 50
# Plain descent: Adam divides small gradients by their own size, which makes their rounding as large as the others'.
SETTINGS = {**QUICK, "max_steps": STEPS, "optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 1.0}
MODELS = {"dense": llama, "experts": qwen3_moe}
CLOCKS = ("runtime", "time", "per_second", "num_tokens_per")


def sft(model: Any, folder: Any, callbacks: list[Any]) -> SFTTrainer:
    args = SFTConfig(output_dir=str(folder), **SETTINGS)
    return SFTTrainer(model, args, train_dataset=TEXTS, processing_class=make_tokenizer(), callbacks=callbacks)


def dpo(model: Any, folder: Any, callbacks: list[Any]) -> DPOTrainer:
    reference = copy.deepcopy(model)
    with torch.no_grad():  # from equal models the first margins would be 0, and rounding decide their sign
        reference.lm_head.weight.mul_(1.1)
    args = DPOConfig(output_dir=str(folder), **SETTINGS)
    data = {"train_dataset": PAIRS, "processing_class": make_tokenizer()}
    return DPOTrainer(model, ref_model=reference, args=args, callbacks=callbacks, **data)


def reward(completion: str) -> float:
    """A number of its own for almost every text.

    Equal rewards of a group leave the divergence's gradient alone, which is thousands of times smaller; its rounding is
    not.
    """
    return float(sum(place * ord(letter) for place, letter in enumerate(completion, start=1)) % 1009)


def grpo(model: Any, folder: Any, callbacks: list[Any]) -> GRPOTrainer:
    model.save_pretrained(folder / "start")
    model.config._name_or_path = str(folder / "start")  # from which the trainer loads its reference model
    args = GRPOConfig(
        output_dir=str(folder), num_generations=2, max_completion_length=5, beta=0.1, temperature=0.8, **SETTINGS
    )
    return GRPOTrainer(
        model,
        reward_funcs=lambda completions, **_: [reward(each) for each in completions],
        args=args,
        train_dataset=PROMPTS,
        processing_class=make_tokenizer(),
        callbacks=callbacks,
    )


TRAINERS = {"sft": sft, "dpo": dpo, "grpo": grpo}


class Recorded(TrainerCallback):
    """The gradients of every step, before they are clipped."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Tensor]] = []

    def on_pre_optimizer_step(self, *_: Any, model: Any = None, **__: Any) -> None:
        self.steps.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})


@pytest.mark.parametrize("make_model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("make", TRAINERS.values(), ids=TRAINERS)
def test_fifty_steps_are_those_of_the_unbound_run(tmp_path, make, make_model):
    kernels, bound, eager = VeOmniCallback(**AUTO), Recorded(), Recorded()
    bound_trainer = make(make_model(), tmp_path / "bound", [kernels, bound])
    bound_trainer.train()
    eager_trainer = make(make_model(), tmp_path / "eager", [eager])
    eager_trainer.train()
    assert {spec.spec.op_name for spec in kernels.binding.plan.kernels} >= {"token_logprobs", "rms_norm"}
    assert len(bound.steps) == len(eager.steps) == STEPS
    for step, (found, wanted) in enumerate(zip(bound.steps, eager.steps, strict=True)):
        assert found.keys() == wanted.keys()
        size = torch.stack([gradient.norm() for gradient in wanted.values()]).norm()
        for name, gradient in wanted.items():
            assert (found[name] - gradient).norm() <= 1e-4 * size, (step, name)
    rows = list(zip(_metrics(bound_trainer), _metrics(eager_trainer), strict=True))
    assert len(rows) == STEPS
    for found_row, wanted_row in rows:
        assert found_row == pytest.approx(wanted_row, rel=1e-4, abs=1e-5)


def _metrics(trainer: Any) -> list[dict[str, float]]:
    rows = [row for row in trainer.state.log_history if "loss" in row]
    return [{name: value for name, value in row.items() if not any(clock in name for clock in CLOCKS)} for row in rows]
