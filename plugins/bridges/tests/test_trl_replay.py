"""``replay_routers`` in TRL's own trainers: the loss runs on the experts that each token was drawn with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig
from tiny_training import AUTO, llama, qwen3_moe
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from trl_data import PROMPTS, QUICK, TEXTS, make_tokenizer

from veomni_bridges.trl import VeOmniCallback
from veomni_bridges.trl_heads import scores_of
from veomni_core.changes.transformation import transformations_of
from veomni_core.errors import BindingError
from veomni_transformers import rollout_replay
from veomni_transformers.router_replay import RouterReplayError, record_router

STEPS = 12
SAME = {
    "preset": "auto",
    "require": "batch_invariant",
    "linear_implementation": "fixed_order",
    "token_logprobs_implementation": "fixed_order",
}
LOGGED = "rollout_difference"


class Compared(GRPOTrainer):  # type: ignore[misc]
    """Logs by how much a row's log-probabilities differ from those that it was drawn with, which TRL shuffles too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.experts: list[tuple[Any, Any]] = []  # of each forward with gradients: replayed, and run on

    def head(self) -> Any:
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        self.hidden: list[Any] = []
        head = self.head().get_output_embeddings()
        key = object()
        head._forward_pre_hooks[key] = lambda _, args: self.hidden.append(args[0][:, -1].detach())
        try:
            return super()._generate_single_turn(*args, **kwargs)
        finally:
            del head._forward_pre_hooks[key]

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        batch = super()._generate_and_score_completions(inputs)
        drawn = batch["completion_ids"]
        with torch.no_grad():
            batch["drawn"] = scores_of(self.head(), torch.stack(self.hidden[: drawn.shape[1]], 1), drawn)
        return batch

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.compared = inputs
        return super().compute_loss(model, inputs, *args, **kwargs)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if torch.is_grad_enabled():
            off = (found[0].detach() - self.compared["drawn"]).abs() * self.compared["completion_mask"]
            self._metrics["train"][LOGGED].append(float(off.max()))
        return found


def scattered(seed: int = 0) -> Any:
    """A model whose experts and words matter: initial weights of 0.02 leave log-probabilities nearly even."""
    model = qwen3_moe()
    model.config.output_router_logits = False  # of which transformers' generate can't make a loss for padded prompts
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.25)
    return model


def grpo(model: Any, folder: Any, callbacks: list[Any], prompts: Any = PROMPTS, more: Any = (), **changes: Any) -> Any:
    settings = {**QUICK, "max_steps": STEPS, "learning_rate": 1e-3, "num_generations": 2, "max_completion_length": 6}
    return Compared(
        model,
        reward_funcs=lambda completions, **_: [float(len(set(each.split()))) for each in completions],
        args=GRPOConfig(output_dir=str(folder), **{**settings, **changes}),
        train_dataset=prompts,
        processing_class=make_tokenizer(),
        callbacks=callbacks,
        **dict(more),
    )


def logged(trainer: Any) -> list[float]:
    return [row[LOGGED] for row in trainer.state.log_history if LOGGED in row]


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("accumulated", [{}, {"gradient_accumulation_steps": 2, "gradient_checkpointing": True}])
def test_each_step_logs_a_difference_of_0(tmp_path, accumulated):
    model = scattered()
    trainer = grpo(model, tmp_path, [VeOmniCallback(**SAME, replay_routers=True)], **accumulated)
    trainer.train()
    assert logged(trainer) == [0.0] * STEPS
    assert [each.name for each in transformations_of(model)] == ["binding"]
    assert not model.model._forward_pre_hooks


def one_token_later(row: Any, rows: Any, number: int) -> Any:
    return OWN_CHOICES(row, rows, number).roll(1, 0)


def of_another_row(row: Any, rows: Any, number: int) -> Any:
    """As where choices stay in the order in which they were drawn, and TRL has shuffled the rows."""
    experts = rows[number][1][: len(row)]
    return torch.cat([experts, experts.new_full((len(row) - len(experts), *experts.shape[1:]), -1)])


OWN_CHOICES = rollout_replay._choices_of


@pytest.mark.parametrize("fault", [one_token_later, of_another_row])
def test_choices_of_other_tokens_are_seen_in_the_difference(tmp_path, monkeypatch, fault):
    monkeypatch.setattr(rollout_replay, "_choices_of", fault)
    kernels = VeOmniCallback(**SAME, replay_routers=True)
    trainer = grpo(scattered(), tmp_path, [kernels], max_steps=2, gradient_accumulation_steps=2)
    trainer.train()
    assert max(logged(trainer)) > 1e-2


def test_later_steps_on_the_same_rollout_keep_its_experts(tmp_path, monkeypatch):
    """Weights have changed a lot in between, so routers would choose others."""
    ran, own = [], rollout_replay.WatchedRouters.replay

    def watched(model: Any, choices: Any) -> Any:
        ran.append(choices.indices)
        return own(model, choices)

    monkeypatch.setattr(rollout_replay.WatchedRouters, "replay", watched)
    kernels = VeOmniCallback(**AUTO, replay_routers=True)
    # Of a batch of four rows two are trained on at a time, twice, and log-probabilities of before are computed.
    trainer = grpo(
        scattered(), tmp_path, [kernels], max_steps=4, num_iterations=2, steps_per_generation=2, learning_rate=0.5
    )
    trainer.train()
    before, (first, second, third, fourth) = ran[:-4], ran[-4:]
    assert first.equal(third) and second.equal(fourth) and not first.equal(second)
    assert sorted(row.flatten().tolist() for each in before for row in each) == sorted(
        row.flatten().tolist() for each in (first, second) for row in each
    )


def test_a_reference_under_the_same_weights_chooses_by_itself(tmp_path, monkeypatch):
    own, replayed = Compared._get_per_token_logps_and_entropies, []

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = own(self, *args, **kwargs)
        hooks = self.head().model._forward_pre_hooks
        [replay] = [each for each in seen if each._handle.id in hooks]
        replayed.append((torch.is_grad_enabled(), replay.replayed is not None))
        return found

    seen: list[Any] = []
    made = rollout_replay.RolloutReplay.__init__
    monkeypatch.setattr(rollout_replay.RolloutReplay, "__init__", lambda self, m: (made(self, m), seen.append(self))[0])
    monkeypatch.setattr(Compared, "_get_per_token_logps_and_entropies", watched)
    lora = {"peft_config": LoraConfig(r=4, lora_dropout=0.0, target_modules=["q_proj", "v_proj"])}
    trainer = grpo(
        scattered(), tmp_path, [VeOmniCallback(**AUTO, replay_routers=True)], more=lora, beta=0.1, max_steps=2
    )
    trainer.train()
    assert replayed == [(False, False), (True, True)] * 2


def test_padded_rows_and_rows_that_end_early(tmp_path, monkeypatch):
    """Right and left padding, in float32: the same experts as routers choose, and a token more that they choose."""
    from datasets import Dataset

    prompts = Dataset.from_list([{"prompt": " ".join(PROMPTS[n]["prompt"].split()[: 1 + n % 4])} for n in range(12)])
    chosen, own = [], rollout_replay.WatchedRouters.replay

    def watched(model: Any, choices: Any) -> Any:
        chosen.append(choices.indices)
        return own(model, choices)

    monkeypatch.setattr(rollout_replay.WatchedRouters, "replay", watched)
    kernels = VeOmniCallback(**AUTO, replay_routers=True)
    trainer = grpo(
        scattered(),
        tmp_path,
        [kernels],
        prompts,
        per_device_train_batch_size=4,
        max_steps=6,
        temperature=3.0,
        max_completion_length=40,
    )
    trainer.train()
    kept = [(each[:, :, 0, 0] >= 0).sum(1) for each in chosen]
    assert any(len(set(each.tolist())) > 1 for each in kept)
    assert max(logged(trainer)) < 1e-3


def test_what_the_model_has_not_drawn_is_refused():
    model = scattered().eval()
    ids = torch.tensor([[5, 9, 17], [7, 3, 2]])
    with rollout_replay.RolloutReplay(model) as replay:
        drawn = model.generate(ids, max_new_tokens=4, do_sample=True, pad_token_id=0)
        with record_router(model) as recorded:
            model(drawn.flip(0))
        assert replay.replayed.indices[:, :-1].equal(recorded.choices.indices[:, :-1])
        with pytest.raises(RouterReplayError, match="row 1 of this forward, of 3 tokens, is none of the 2"):
            model(torch.stack([drawn[0, :3], drawn[1, 1:4]]))
        with pytest.raises(RouterReplayError, match="beams change the places of rows"):
            model.generate(ids, max_new_tokens=4, num_beams=2, pad_token_id=0)
        with pytest.raises(RouterReplayError, match="rows are known by input_ids"):
            model(inputs_embeds=model.get_input_embeddings()(ids))
    model(ids)


def test_trainers_and_settings_under_which_nothing_is_known_are_refused(tmp_path):
    kernels = VeOmniCallback(**AUTO, replay_routers=True)
    with pytest.raises(RouterReplayError, match="no layer in which a router chooses"):
        grpo(llama(), tmp_path, [kernels])
    args = SFTConfig(output_dir=str(tmp_path), **QUICK)
    with pytest.raises(BindingError, match="draws nothing, so there are no experts to replay"):
        SFTTrainer(qwen3_moe(), args, train_dataset=TEXTS, processing_class=make_tokenizer(), callbacks=[kernels])
    args = GRPOConfig(output_dir=str(tmp_path), num_generations=2, **QUICK)
    args.use_vllm = True
    assert [*kernels._problems_of_library(args)] == [
        "experts are known of what the model itself draws; leave out replay_routers or use_vllm"
    ]
