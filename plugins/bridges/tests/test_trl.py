"""``VeOmniCallback`` in TRL's trainers: the losses of the unbound run, and what TRL computes itself is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from tiny_training import AUTO, SHAPE, close, llama, measured, qwen3_moe, trainer
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer
from trl_data import PAIRS, PROMPTS, QUICK, TEXTS, make_tokenizer

from veomni_bridges import transformers
from veomni_bridges.trl import VeOmniCallback
from veomni_core import OpsConfig, bind, binding_of
from veomni_core.errors import BindingError, ConfigError, HostError


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


def sft(model: Any, folder: Path, tokenizer: Any, callbacks: list[Any], **more: Any) -> SFTTrainer:
    args = SFTConfig(output_dir=str(folder), **QUICK)
    return SFTTrainer(model, args, train_dataset=TEXTS, processing_class=tokenizer, callbacks=callbacks, **more)


def dpo(model: Any, folder: Path, tokenizer: Any, callbacks: list[Any], **more: Any) -> DPOTrainer:
    args = DPOConfig(output_dir=str(folder), **QUICK)
    more.setdefault("ref_model", llama())
    return DPOTrainer(model, args=args, train_dataset=PAIRS, processing_class=tokenizer, callbacks=callbacks, **more)


def grpo(model: Any, folder: Path, tokenizer: Any, callbacks: list[Any]) -> GRPOTrainer:
    args = GRPOConfig(output_dir=str(folder), num_generations=2, max_completion_length=6, **QUICK)
    return GRPOTrainer(
        model,
        reward_funcs=lambda completions, **_: [float(len(set(each.split()))) for each in completions],
        args=args,
        train_dataset=PROMPTS,
        processing_class=tokenizer,
        callbacks=callbacks,
    )


def reward(model: Any, folder: Path, tokenizer: Any, callbacks: list[Any]) -> RewardTrainer:
    args = RewardConfig(output_dir=str(folder), **QUICK)
    return RewardTrainer(model, args, train_dataset=PAIRS, processing_class=tokenizer, callbacks=callbacks)


TRAINERS = {"sft": sft, "dpo": dpo, "grpo": grpo}


def run(make: Any, model: Any, folder: Path, tokenizer: Any, *callbacks: Any, **more: Any) -> list[float]:
    training = make(model, folder, tokenizer, list(callbacks), **more)
    training.train()
    return measured(training)


@pytest.mark.parametrize("make", TRAINERS.values(), ids=TRAINERS)
def test_the_losses_are_those_of_the_unbound_run(tmp_path, tokenizer, make):
    kernels, model = VeOmniCallback(**AUTO), llama()
    bound = run(make, model, tmp_path / "bound", tokenizer, kernels)
    eager = run(make, llama(), tmp_path / "eager", tokenizer)
    assert close(bound, eager)
    assert {planned.spec.op_name for planned in kernels.binding.plan.kernels} >= {"rms_norm", "swiglu_mlp"}
    receipt = json.loads((tmp_path / "bound" / "veomni_receipt.json").read_text())
    assert "add_fused_lm_head" in receipt["notes"][0]


def test_the_experts_of_a_model_run_on_their_kernel(tmp_path, tokenizer):
    kernels, model = VeOmniCallback(**AUTO), qwen3_moe()
    bound = run(sft, model, tmp_path / "bound", tokenizer, kernels)
    # Adam's first steps divide gradients by their own size, and so enlarge the rounding of the smallest.
    assert close(bound, run(sft, qwen3_moe(), tmp_path / "eager", tokenizer), 1e-4)
    assert "moe_experts" in {planned.spec.op_name for planned in kernels.binding.plan.kernels}


def test_an_adapter_that_trl_adds(tmp_path, tokenizer):
    lora = {"peft_config": LoraConfig(r=4, lora_dropout=0.0, target_modules=["q_proj", "v_proj"])}
    kernels, model = VeOmniCallback(**AUTO), llama()
    bound = run(sft, model, tmp_path / "bound", tokenizer, kernels, **lora)
    assert close(bound, run(sft, llama(), tmp_path / "eager", tokenizer, **lora))
    assert {planned.spec.op_name for planned in kernels.binding.plan.kernels} >= {"rms_norm", "swiglu_mlp"}


def test_a_trainer_that_reads_the_logits(tmp_path, tokenizer):
    def scorer() -> LlamaForSequenceClassification:
        torch.manual_seed(0)
        return LlamaForSequenceClassification(LlamaConfig(**SHAPE, num_labels=1, pad_token_id=0))

    kernels, model = VeOmniCallback(**AUTO), scorer()
    bound = run(reward, model, tmp_path / "bound", tokenizer, kernels)
    assert close(bound, run(reward, scorer(), tmp_path / "eager", tokenizer))
    (note,) = json.loads((tmp_path / "bound" / "veomni_receipt.json").read_text())["notes"]
    assert "from the model's outputs" in note
    assert {planned.spec.op_name for planned in kernels.binding.plan.kernels} >= {"rms_norm", "swiglu_mlp"}


def test_the_reference_model_can_be_bound_too(tmp_path, tokenizer):
    kernels, model = VeOmniCallback(**AUTO), llama()
    training = dpo(model, tmp_path / "bound", tokenizer, [kernels])
    binding = bind(training.ref_model, {"preset": "auto", "cross_entropy_loss_implementation": "eager"}, training=False)
    training.train()
    assert close(measured(training), run(dpo, llama(), tmp_path / "eager", tokenizer))
    assert binding.active and binding.plan.kernels


def test_undo_gives_the_eager_model_back(tmp_path, tokenizer):
    model = llama()
    sft(model, tmp_path, tokenizer, [VeOmniCallback(**AUTO, undo=True)]).train()
    assert binding_of(model) is None and type(model) is type(llama())
    assert not vars(model.model.norm).get("forward")
    ids, eager = torch.tensor([[5, 9, 17, 3]]), llama()
    eager.load_state_dict(model.state_dict())
    assert torch.equal(model(ids, labels=ids).loss, eager(ids, labels=ids).loss)


def test_a_kernel_for_a_loss_that_trl_computes_is_refused():
    with pytest.raises(ConfigError, match="never run: cross_entropy_loss_implementation: chunk_loss. Leave"):
        VeOmniCallback(preset="auto", cross_entropy_loss_implementation="chunk_loss")
    with pytest.raises(ConfigError, match="as a mapping"):
        VeOmniCallback(OpsConfig.from_dict(AUTO))


def test_each_library_has_its_own_callback(tmp_path, tokenizer):
    with pytest.raises(BindingError, match=r"pass the VeOmniCallback of veomni_bridges.trl"):
        sft(llama(), tmp_path, tokenizer, [transformers.VeOmniCallback(**AUTO)])
    with pytest.raises(BindingError, match=r"pass the VeOmniCallback of veomni_bridges.transformers"):
        trainer(llama(), tmp_path, VeOmniCallback(**AUTO))


def test_an_older_trl_is_refused(monkeypatch):
    monkeypatch.setattr("veomni_bridges.libraries.version", lambda name: "1.4.0")
    with pytest.raises(HostError, match=r"trl 1.9 or newer, and 1.4.0 is here"):
        VeOmniCallback(**AUTO).on_init_end(None, None, None)
