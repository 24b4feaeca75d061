"""What others do with a model: trainers run a bound one as its eager twin, hub kernels don't replace its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Trainer, TrainingArguments

from counting_kernels import calls, counting_registry
from models import EVERY_KERNEL, build, step, tokens
from veomni_core import bind
from veomni_core.errors import BindingError

REGISTRY = counting_registry("one")
STEPS = 3
LAYERS = {"rms_norm", "rotary_pos_emb", "moe_experts"}
Losses = list[float]


def assert_same_losses(train: Callable[[PreTrainedModel], Losses], ops: set[str]) -> None:
    eager, bound = build("qwen3_moe"), build("qwen3_moe")
    wanted = train(eager)
    bind(bound, EVERY_KERNEL, registry=REGISTRY)
    calls.clear()
    found = train(bound)
    assert len(found) == STEPS
    assert found == pytest.approx(wanted, rel=1e-4)
    assert found[-1] < found[0]
    assert ops <= {op for op, *_ in calls}
    for mine, theirs in zip(bound.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


def logged(trainer: Trainer) -> Losses:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def settings(folder) -> dict[str, object]:
    return {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "logging_steps": 1,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
    }


def test_transformers_trainer(tmp_path):
    rows = [{"input_ids": ids, "labels": ids} for ids in tokens(2, 9).repeat(2 * STEPS, 1)]

    def train(model: PreTrainedModel) -> Losses:
        return logged(Trainer(model, TrainingArguments(**settings(tmp_path)), train_dataset=rows))

    assert_same_losses(train, {*LAYERS, "cross_entropy_loss"})


def test_trl_s_sft_trainer(tmp_path):
    trl = pytest.importorskip("trl", reason="trl is not installed")
    datasets = pytest.importorskip("datasets")
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{number}": number for number in range(64)}
    level = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    level.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=level, pad_token="w0", eos_token="w2", unk_token="w0")
    rows = datasets.Dataset.from_dict({"input_ids": tokens(2, 9).repeat(2 * STEPS, 1).tolist()})

    def train(model: PreTrainedModel) -> Losses:
        config = trl.SFTConfig(**settings(tmp_path), bf16=False, dataset_kwargs={"skip_prepare_dataset": True})
        return logged(trl.SFTTrainer(model, config, train_dataset=rows, processing_class=tokenizer))

    assert_same_losses(train, LAYERS)  # it takes its loss from log probabilities of its own


def test_hub_kernels_are_refused_once_a_model_is_bound():
    model = build("llama")
    binding = bind(model, EVERY_KERNEL, registry=REGISTRY)
    for part in (model, model.model):
        with pytest.raises(BindingError, match=r"this model is bound, .* Call binding_of\(model\)\.undo\(\) first"):
            part.use_kernels = True
    assert not model.train().use_kernels
    calls.clear()
    step(model)
    assert any(op == "rms_norm" for op, *_ in calls)
    binding.undo()
    assert "set_use_kernels" not in vars(model)
