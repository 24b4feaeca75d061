"""The callbacks in trainers of models of images, with the libraries' own collators: the losses of the unbound run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trl
from datasets import Dataset, Features, Image, Json, List
from test_methods_on_media import rows_of
from tiny_processors import media_folder, needs_torchvision
from tiny_training import AUTO, arguments, close, measured
from transformers import AutoProcessor, Trainer
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling
from trl_data import QUICK

from veomni_bridges import transformers
from veomni_bridges.trl import VeOmniCallback
from veomni_transformers.build import load_as_trained

FAMILIES = [
    needs_torchvision(each, marks=[pytest.mark.thorough])
    for each in ("llava", "gemma3", "internvl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")
]


def pictures(method: str) -> Dataset:
    rows = rows_of("kto" if method == "sft" else method)
    rows = [{name: value for name, value in row.items() if method == "kto" or name != "label"} for row in rows]
    return Dataset.from_list(rows, features=Features({name: Json() for name in rows[0]} | {"images": List(Image())}))


def length(completions: list[Any], **columns: Any) -> list[float]:
    return [float(len(turns[-1]["content"])) for turns in completions]


def by_trl(method: str, folder: Path, out: Path, *callbacks: Any) -> list[float]:
    model, more, given = load_as_trained(folder), {}, {}
    if method in ("dpo", "kto"):
        given["ref_model"] = load_as_trained(folder)
    elif method in ("grpo", "rloo"):
        given["reward_funcs"], more = length, {"num_generations": 2, "max_completion_length": 6}
    made = getattr(trl, f"{method.upper()}Config")(str(out), **QUICK, **more)
    processor, trainer = AutoProcessor.from_pretrained(folder), getattr(trl, f"{method.upper()}Trainer")
    training = trainer(
        model, args=made, train_dataset=pictures(method), processing_class=processor, callbacks=[*callbacks], **given
    )
    training.train()
    return measured(training)


@pytest.mark.parametrize(
    "method", ["sft", *(pytest.param(each, marks=pytest.mark.thorough) for each in ("dpo", "kto", "grpo", "rloo"))]
)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_trls_trainers_on_images_have_the_losses_of_the_unbound_run(
    tmp_path: Path, model_type: str, method: str
) -> None:
    folder, kernels = media_folder(model_type, tmp_path / "base"), VeOmniCallback(**AUTO)
    bound = by_trl(method, folder, tmp_path / "bound", kernels)
    assert close(bound, by_trl(method, folder, tmp_path / "eager"), 1e-4)
    assert kernels.binding is not None and not kernels.binding.receipt.changed
    assert "attention" in {planned.spec.op_name for planned in kernels.binding.plan.kernels}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_transformers_trainer_on_images_has_the_losses_of_the_unbound_run(tmp_path: Path, model_type: str) -> None:
    folder, kernels = media_folder(model_type, tmp_path / "base"), transformers.VeOmniCallback(**AUTO)
    collator = DataCollatorForVisionLanguageModeling(AutoProcessor.from_pretrained(folder))
    found = []
    for callbacks in ([kernels], []):
        args = arguments(tmp_path / str(len(found)), remove_unused_columns=False)
        training = Trainer(load_as_trained(folder), args, collator, train_dataset=pictures("sft"), callbacks=callbacks)
        training.train()
        found.append(measured(training))
    assert close(*found, 1e-4)
    assert kernels.binding is not None and not kernels.binding.receipt.changed
    assert "cross_entropy_loss" in {planned.spec.op_name for planned in kernels.binding.plan.kernels}
