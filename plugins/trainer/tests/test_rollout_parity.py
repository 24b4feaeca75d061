"""``train.parity`` and ``grpo.replay_routers``: what a job's rollouts have in common with its training."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from post_training import needs_examples
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from veomni_core.cli.app import build_app
from veomni_core.errors import ConfigError, ConformanceError, JobFileError
from veomni_trainer.job.load import load_job
from veomni_trainer.loop import trl_trainers
from veomni_transformers import rollout_replay
from veomni_transformers.router_replay import RouterReplayError

pytestmark = needs_examples

SAME = (
    "model.ops_implementation={preset: auto, require: batch_invariant, linear_implementation: fixed_order, "
    "token_logprobs_implementation: fixed_order}"
)
MOE = (
    "model.config={model_type: qwen3_moe, hidden_size: 64, moe_intermediate_size: 32, num_hidden_layers: 2, "
    "num_attention_heads: 4, num_key_value_heads: 2, head_dim: 16, num_experts: 8, num_experts_per_tok: 2, "
    "initializer_range: 0.2}"
)
HYBRID = (
    "model.config={model_type: qwen3_next, hidden_size: 64, intermediate_size: 64, moe_intermediate_size: 32, "
    "shared_expert_intermediate_size: 32, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, "
    "head_dim: 16, num_experts: 8, num_experts_per_tok: 2, linear_num_key_heads: 2, linear_num_value_heads: 4, "
    "linear_key_head_dim: 8, linear_value_head_dim: 8, layer_types: [linear_attention, full_attention], "
    "initializer_range: 0.2}"
)
QWEN3 = {"model_type": "qwen3", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 512}
QWEN3 |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}
FEW = ("train.steps=4", "train.parity=stop")


def rows_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def differences(run):
    return [[row[f"rollout_difference/{which}"] for which in ("mean", "largest")] for row in rows_of(run)]


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize(
    "method, changes",
    [("grpo", ()), ("rloo", ()), ("grpo", (MOE, "train.grpo.replay_routers=true")), ("grpo", (HYBRID,))],
)
def test_under_batch_invariant_kernels_each_step_logs_a_difference_of_exactly_0(here, go, method, changes):
    go(method, *FEW, *changes, SAME, "train.gradient_accumulation=2")
    assert differences(here / "run") == [[0.0, 0.0]] * 4


@pytest.mark.thorough
def test_other_kernels_log_their_differences_within_the_limit(here, go):
    go("grpo", *FEW, "train.parity_limit=1e-4")
    found = differences(here / "run")
    assert all(0.0 < mean < largest < 1e-4 for mean, largest in found) and len(found) == 4
    assert "Training beside the rollout" in (here / "run" / "report.html").read_text()


def break_rollouts(monkeypatch, by=1e-6):
    own = trl_trainers.RolloutParity.scores
    monkeypatch.setattr(
        trl_trainers.RolloutParity, "scores", lambda self, ids: own(self, ids) + by * (torch.arange(ids.shape[1]) == 2)
    )


@pytest.mark.thorough
def test_a_difference_ends_training_before_weights_change(go, monkeypatch):
    break_rollouts(monkeypatch)
    says = r"step 1: .* on average and 9\.54e-07 at most, and the plan requires batch_invariant"
    with pytest.raises(ConformanceError, match=says):
        go("grpo", *FEW, SAME)


@pytest.mark.thorough
def test_or_is_warned_of_once(here, go, monkeypatch, caplog):
    break_rollouts(monkeypatch, 0.5)
    with caplog.at_level(logging.WARNING):
        go("grpo", "train.steps=2", "train.parity=warn")
    assert [r.getMessage() for r in caplog.records if "train.parity_limit is 0.1" in r.getMessage()][1:] == []
    assert [largest for _, largest in differences(here / "run")] == pytest.approx([0.5, 0.5], abs=1e-3)


def parity_of(here, *changes):
    changes = [word for each in (SAME, "train.device=cpu", *changes) for word in ("--set", each)]
    run = CliRunner().invoke(build_app(), ["parity", str(here / "grpo.yaml"), "--json", *changes])
    return {each["layout"]: each for each in json.loads(run.stdout)["layouts"]}


def test_the_command_refuses_a_job_whose_model_scores_whole_sequences(here):
    run = CliRunner().invoke(build_app(), ["parity", str(here / "reward.yaml")])
    assert "trains Qwen3ForSequenceClassification, which gives tokens no log-prob" in f"{run.output} {run.exception}"


@pytest.mark.thorough
def test_the_command_compares_under_the_jobs_autocast_and_with_its_adapter(here):
    *ours, own = parity_of(here, "train.precision=bf16_mixed").values()
    assert own["largest"] > 1e-4 and not any(each["largest"] for each in ours)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**QWEN3)).save_pretrained(here / "weights")
    weights = (f"model.weights={here / 'weights'}", "model.config=null", "lora={rank: 4, target_modules: [q_proj]}")
    decoded = parity_of(here, *weights)["one sequence token by token, with a cache"]
    assert decoded["first"] == "model.layers.0.self_attn.q_proj.lora_A.default (Linear)"


def test_parity_of_a_method_that_draws_nothing_is_refused(here):
    with pytest.raises((ConfigError, JobFileError), match="parity compares what grpo or rloo draws"):
        load_job(here / "sft.yaml", ("train.parity=stop",))


@pytest.mark.thorough
@pytest.mark.parametrize("checkpointed", ["false", "true"])
def test_training_takes_the_experts_of_the_rollout(here, go, monkeypatch, checkpointed):
    taken, own = [], rollout_replay.WatchedRouters.replay

    def watched(model, choices):
        taken.append(choices)
        return own(model, choices)

    monkeypatch.setattr(rollout_replay.WatchedRouters, "replay", watched)
    changes = (MOE, *FEW, "train.parity_limit=1e-4", f"train.gradient_checkpointing={checkpointed}")
    go("grpo", *changes, "train.grpo.replay_routers=true", "train.gradient_accumulation=2")
    replayed = rows_of(here / "run")
    assert len(taken) == 8 and all(0 <= choices.indices.max() < 8 for choices in taken)
    assert any(choices.indices.min() == -1 for choices in taken)  # padding, and each sequence's last token
    go("grpo", *changes, "train.gradient_accumulation=2", overwrite=True)
    free = rows_of(here / "run")  # in float32 no choice is on the edge: the same experts, and so the same losses
    assert [row["loss"] for row in replayed] == pytest.approx([row["loss"] for row in free], rel=1e-4, abs=1e-6)


@pytest.mark.thorough
def test_choices_of_a_rollout_that_went_elsewhere_are_what_training_runs_on(here, go, monkeypatch):
    own = rollout_replay.RecordedChoices.choices.fget

    def shifted(self):
        choices = own(self)
        choices.indices.add_(1).remainder_(8)
        return choices

    monkeypatch.setattr(rollout_replay.RecordedChoices, "choices", property(shifted))
    with pytest.raises(ConformanceError, match="train.parity_limit is 0.01"):
        go("grpo", MOE, *FEW, "train.parity_limit=0.01", "train.grpo.replay_routers=true")


def test_a_model_without_routers_is_refused_before_anything_is_drawn(go):
    with pytest.raises(RouterReplayError, match="no layer in which a router chooses"):
        go("grpo", *FEW, "train.grpo.replay_routers=true")
