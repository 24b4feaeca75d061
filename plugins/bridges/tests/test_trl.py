"""``VeOmniCallback`` in TRL's trainers: the losses of the unbound run, and what TRL computes itself is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import trl.trainer.utils
from datasets import Dataset
from peft import LoraConfig
from tiny_training import AUTO, SHAPE, close, llama, measured, qwen3_moe, trainer
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl_data import PAIRS, PROMPTS, QUICK, TEXTS, make_tokenizer

import veomni_torch.token_logprobs as token_logprobs
from veomni_bridges import transformers
from veomni_bridges.trl import VeOmniCallback
from veomni_bridges.trl_heads import FusedHeads, fused_forward
from veomni_core import OpsConfig, bind, binding_of
from veomni_core.changes.transformation import transformations_of
from veomni_core.errors import BindingError, ConfigError, ConformanceError, HostError


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


def kto(model: Any, folder: Path, tokenizer: Any, callbacks: list[Any]) -> KTOTrainer:
    judged = [
        {"prompt": row["prompt"], "completion": row["chosen"], "label": n % 2 == 0} for n, row in enumerate(PAIRS)
    ]
    args = KTOConfig(output_dir=str(folder), **QUICK)
    data = {"train_dataset": Dataset.from_list(judged), "processing_class": tokenizer}
    return KTOTrainer(model, ref_model=llama(), args=args, callbacks=callbacks, **data)


def rloo(model: Any, folder: Path, tokenizer: Any, callbacks: list[Any]) -> RLOOTrainer:
    args = RLOOConfig(output_dir=str(folder), num_generations=2, max_completion_length=6, beta=0.0, **QUICK)
    reward = {"reward_funcs": lambda completions, **_: [float(len(set(each.split()))) for each in completions]}
    data = {"train_dataset": PROMPTS, "processing_class": tokenizer}
    return RLOOTrainer(model, args=args, callbacks=callbacks, **reward, **data)


TRAINERS = {"sft": sft, "dpo": dpo, "grpo": grpo, "kto": kto, "rloo": rloo}


def run(make: Any, model: Any, folder: Path, tokenizer: Any, *callbacks: Any, **more: Any) -> list[float]:
    training = make(model, folder, tokenizer, list(callbacks), **more)
    training.train()
    return measured(training)


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("make", TRAINERS.values(), ids=TRAINERS)
def test_the_losses_are_those_of_the_unbound_run(tmp_path, tokenizer, make, monkeypatch):
    counted_calls, forward = 0, token_logprobs._TokenLogprobs.forward

    def counted(*args: Any) -> Any:
        nonlocal counted_calls
        counted_calls += 1
        return forward(*args)

    monkeypatch.setattr(token_logprobs._TokenLogprobs, "forward", staticmethod(counted))
    kernels, model = VeOmniCallback(**AUTO), llama()
    bound = run(make, model, tmp_path / "bound", tokenizer, kernels)
    eager = run(make, llama(), tmp_path / "eager", tokenizer)
    assert close(bound, eager)
    assert {planned.spec.op_name for planned in kernels.binding.plan.kernels} >= {"rms_norm", "token_logprobs"}
    receipt = json.loads((tmp_path / "bound" / "veomni_receipt.json").read_text())
    assert "token_logprobs/causal:chunk_logprobs in the model computes those" in receipt["notes"][0]
    assert counted_calls > 3  # each step, and the comparison before
    assert fused_forward(model).__globals__ is trl.trainer.utils.__dict__  # TRL's own again


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


@pytest.mark.thorough
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


def test_a_named_kernel_that_would_not_run_is_refused(tmp_path, tokenizer):
    named = VeOmniCallback(**AUTO, token_logprobs_implementation="chunk_logprobs")
    training = sft(llama(), tmp_path, tokenizer, [named])
    del training.model.forward  # as in a trainer that computes its loss from the logits
    with pytest.raises(BindingError, match="computes no log-probabilities by a fused head.*leave token_logprobs_impl"):
        training.train()


def test_without_the_field_trl_computes_them_and_the_receipt_says_so(tmp_path, tokenizer):
    kernels = VeOmniCallback(preset="auto", token_logprobs_implementation="eager")
    run(sft, llama(), tmp_path, tokenizer, kernels)
    assert "token_logprobs" not in {planned.spec.op_name for planned in kernels.binding.plan.kernels}
    assert "TRL's own function computes those" in json.loads((tmp_path / "veomni_receipt.json").read_text())["notes"][0]


@pytest.fixture
def bound_with_a_fused_head() -> Any:
    model = llama()
    trl.trainer.utils.add_fused_lm_head(model, temperature=0.7, outputs=("log_probs", "entropy", "is_top1"))
    return bind(model, {"preset": "eager", "token_logprobs_implementation": "chunk_logprobs"})


def test_a_kernel_that_computes_something_else_than_trl_is_refused(bound_with_a_fused_head, monkeypatch):
    applied = token_logprobs._Arithmetic.applied
    halved = lambda self, logits, rows: applied(self, logits / 2, rows)  # noqa: E731
    monkeypatch.setattr(token_logprobs._Arithmetic, "applied", halved)
    with pytest.raises(ConformanceError, match="is not what TRL's fused head computes for the model: log_probs is off"):
        FusedHeads(bound_with_a_fused_head)
    assert fused_forward(bound_with_a_fused_head.model).__globals__ is trl.trainer.utils.__dict__


def test_a_kernel_without_an_output_that_the_trainer_asks_for_is_refused(bound_with_a_fused_head, monkeypatch):
    for op in bound_with_a_fused_head.plan.ops:
        for decision in op.sites:
            if decision.spec is not None:
                object.__setattr__(decision.spec, "features", ("mean_logit",))
    with pytest.raises(BindingError, match="this trainer asks for top1, which token_logprobs/causal:chunk_logprobs"):
        FusedHeads(bound_with_a_fused_head)


def test_a_function_of_trl_that_the_bridge_does_not_know_is_refused(bound_with_a_fused_head, monkeypatch):
    class Later:
        @staticmethod
        def forward(ctx: Any, hidden: Any, weight: Any, targets: Any) -> None: ...

    monkeypatch.setattr(trl.trainer.utils, "_ChunkedLogProbFunction", Later)
    with pytest.raises(BindingError, match=r"takes \(hidden, weight, targets\), and this bridge knows one that takes"):
        FusedHeads(bound_with_a_fused_head)


def test_a_head_that_is_cast_to_float32():
    model, ids = llama().bfloat16(), torch.randint(3, 64, (2, 9))
    trl.trainer.utils.add_fused_lm_head(model, cast_lm_head_to_fp32=True)
    with bind(model, {"preset": "eager", "token_logprobs_implementation": "auto"}) as binding:
        wanted = model(ids, labels=ids, fused_lm_head=True)
        with FusedHeads(binding) as heads:
            assert str(heads.kernels[""]) == "token_logprobs/causal:chunk_logprobs"
            found = model(ids, labels=ids, fused_lm_head=True)
        assert [each.name for each in transformations_of(model)] == ["binding"]
    torch.testing.assert_close(found.log_probs, wanted.log_probs)


def test_beneath_accelerates_wrapper_for_mixed_precision(tmp_path, tokenizer):
    kernels, model = VeOmniCallback(**AUTO), llama()
    mixed = {**QUICK, "bf16": True}
    args = SFTConfig(output_dir=str(tmp_path), **mixed)
    training = SFTTrainer(model, args, train_dataset=TEXTS, processing_class=tokenizer, callbacks=[kernels])
    training.train()
    eager = SFTTrainer(llama(), args, train_dataset=TEXTS, processing_class=tokenizer)
    eager.train()
    assert close(measured(training), measured(eager), 3e-2)
    notes = json.loads((tmp_path / "veomni_receipt.json").read_text())["notes"]
    assert "token_logprobs/causal:chunk_logprobs in the model computes those" in notes[0]


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
