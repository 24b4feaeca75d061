"""A rollout's choices of experts are replayed in training: as if each router had been forced by hand."""

from __future__ import annotations

import copy

import pytest
import torch
from routers_by_hand import FAMILIES, by_hand, made
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.nn import functional as F

from distributed import run_ranks
from models import assert_equal_steps, assert_same_bits, build, tokens
from veomni_core import bind
from veomni_core.errors import BindingError
from veomni_transformers.proving.code_reading import Readings
from veomni_transformers.router_replay import (
    RouterChoices,
    RouterReplayError,
    WatchedRouters,
    proven_routers,
    record_router,
    router_replay,
)
from veomni_transformers.routers.proof import prove_router

SAME = {"preset": "auto", "require": "batch_invariant", "linear_implementation": "fixed_order"}
IDS = tokens(3, 9)
LEFT, RIGHT = (F.pad(torch.ones(3, 9, dtype=torch.long), around) for around in ((4, 0), (0, 4)))
LEFT[0, 4:6] = RIGHT[0, 7:9] = 0  # the first sequence is shorter
FLAT = IDS.flatten()[2:][None]


def padded(mask):
    """Tokens of three sequences, the first without its first two, where the mask is 1."""
    ids = torch.zeros_like(mask)
    ids[mask.bool()] = FLAT[0]
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp_min(0)}


PACKED = {"input_ids": FLAT, "position_ids": torch.cat([torch.arange(7), torch.arange(9), torch.arange(9)])[None]}


def recorded(model, inputs):
    with record_router(model) as found, torch.no_grad():
        model(**inputs, use_cache=False)
    return found.choices


def step(model, inputs):
    model.zero_grad(set_to_none=True)
    labels = inputs["input_ids"].masked_fill(inputs["input_ids"] == 0, -100)
    loss = model(**inputs, labels=labels, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_gradients_are_those_of_routers_that_are_forced_by_hand(family, monkeypatch):
    rollout, model = made(family, seed=7), made(family)
    choices = recorded(rollout, padded(LEFT))
    for inputs, theirs in (
        (padded(LEFT), choices),
        (padded(RIGHT), choices.packed(LEFT).padded(RIGHT)),
        (PACKED, choices.packed(LEFT)),
    ):
        if inputs is PACKED and family == "gpt_oss":
            continue  # its own code sees no boundaries
        free = step(model, inputs)
        with router_replay(model, theirs):
            found = step(model, inputs)
            assert recorded(model, inputs).indices[theirs.indices >= 0].equal(theirs.indices[theirs.indices >= 0])
        assert_same_bits(step(model, inputs), free)
        with monkeypatch.context() as patched:
            by_hand(patched, model, family, recorded_or(model, inputs, theirs))
            wanted = step(model, inputs)
        assert_equal_steps(found, wanted)
        assert abs(found[0] - free[0]) > 1e-4


def recorded_or(model, inputs, choices):
    """The choices, and at -1 the model's own."""
    own = recorded(model, inputs).indices
    return torch.where(choices.indices < 0, own, choices.indices)


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_chose_itself_is_exact(family):
    model = made(family)
    inputs = padded(LEFT)
    free, choices = step(model, inputs), recorded(model, inputs)
    with router_replay(model, RouterChoices(torch.full_like(choices.indices, -1), choices.experts)):
        assert_same_bits(step(model, inputs), free)
    with router_replay(model, choices):  # the same experts, in the same order
        found = step(model, inputs)
    assert torch.equal(found[0], free[0])
    assert_equal_steps(found, free)


def test_positions_before_the_first_that_is_replayed_keep_their_bits():
    model, ids = made("qwen3_moe"), tokens(2, 8)
    choices = recorded(made("qwen3_moe", seed=7), {"input_ids": ids})
    choices.indices[:, :5] = -1
    with bind(model, SAME, device="cpu"), torch.no_grad():  # else experts' products depend on how many rows each has
        free = model(ids).logits
        with router_replay(model, choices):
            found = model(ids).logits
    assert found[:, :5].equal(free[:, :5]) and not found[:, 5:].equal(free[:, 5:])


def test_a_generation_with_a_cache_is_recorded_token_by_token():
    model, ids = made("qwen3_moe").eval(), tokens(2, 5)
    with record_router(model) as found:
        drawn = model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert found.choices.indices.shape == (2, 8, 2, 2)
    assert found.choices.indices.equal(recorded(model, {"input_ids": drawn[:, :-1]}).indices)


def test_nothing_of_it_stays_in_the_model():
    model = made("deepseek_v3")
    before = [(type(each), dict(vars(each))) for each in model.modules()]
    choices = recorded(model, {"input_ids": IDS})
    with router_replay(model, choices):
        assert any(type(each) is not kind for each, (kind, _) in zip(model.modules(), before, strict=True))
    assert [(type(each), dict(vars(each))) for each in model.modules()] == before


def test_the_inner_of_two_replays_counts_and_copies_and_models_that_are_bound_meanwhile_keep_nothing():
    model, inputs = made("qwen3_moe"), {"input_ids": IDS}
    one, other = (recorded(made("qwen3_moe", seed=seed), inputs) for seed in (7, 8))
    own, free = recorded(model, inputs), RouterChoices(torch.full_like(one.indices, -1), one.experts)
    with router_replay(model, one):
        copied = copy.deepcopy(model)
        for inner, wanted in ((other, other), (free, own)):
            with router_replay(model, inner):
                assert recorded(model, inputs).indices.equal(wanted.indices)
        assert recorded(model, inputs).indices.equal(one.indices)
    assert recorded(copied, inputs).indices.equal(own.indices)
    with pytest.raises(BindingError, match="on top of this router replay"), router_replay(model, one):
        binding = bind(model, {"preset": "eager"}, device="cpu")
    binding.undo()
    assert recorded(model, inputs).indices.equal(own.indices)


def test_bound_models_replay_under_the_kernel_of_their_routers_product():
    model, inputs = made("deepseek_v3"), {"input_ids": tokens(5, 15)}  # more rows than a tile of the kernel has
    choices = recorded(made("deepseek_v3", seed=7), inputs)
    with router_replay(model, choices):
        wanted = step(model, inputs)
    with bind(model, SAME, device="cpu"), router_replay(model, choices):
        found = step(model, inputs)
        assert recorded(model, inputs).indices.equal(choices.indices)
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-6, atol=0.0)


def test_checkpointed_layers_replay_in_backward_and_refuse_one_that_comes_after():
    model, inputs = made("mixtral"), {"input_ids": IDS}
    choices = recorded(made("mixtral", seed=7), inputs)
    with router_replay(model, choices):
        wanted = step(model, inputs)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with record_router(model) as again, router_replay(model, choices):
        found = step(model, inputs)
    assert_equal_steps(found, wanted)
    assert again.choices.indices.shape == choices.indices.shape  # what backward repeats is not recorded
    with router_replay(model, choices):
        loss = model(**inputs, labels=IDS, use_cache=False).loss
    with pytest.raises(Exception, match="call backward within it|different metadata|shape"):
        loss.backward()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(RouterReplayError, match="use_reentrant"), router_replay(model, choices):
        pass


@pytest.mark.parametrize("how", CheckpointImpl)
def test_layers_in_torchs_wrapper_are_checkpointed_too(how):
    """Under other choices of the same shapes, backward would give gradients of experts that the loss did not have."""
    model, inputs = made("mixtral"), {"input_ids": IDS}
    layers, choices = model.model.layers, [recorded(made("mixtral", seed=seed), inputs) for seed in (7, 8)]
    for number, layer in enumerate(layers):
        layers[number] = checkpoint_wrapper(layer, how)
    with WatchedRouters(model, proven_routers(model), "rollout replay") as watched:
        if how is CheckpointImpl.REENTRANT:
            with pytest.raises(RouterReplayError, match="use_reentrant"):
                watched.replay(choices[0])
            return
        watched.replay(choices[0])
        loss = model(**inputs, labels=IDS, use_cache=False).loss
        watched.replay(choices[1])
        with pytest.raises(RouterReplayError, match="call backward within it"):
            loss.backward()


@pytest.mark.parametrize("part", ["mlp", "mlp.gate"])
def test_blocks_and_routers_that_compile_in_place_are_replayed(part):
    model, inputs = made("qwen3_moe"), {"input_ids": IDS}
    choices = recorded(made("qwen3_moe", seed=7), inputs)
    for layer in model.model.layers:
        layer.get_submodule(part).compile(backend="eager")
    with router_replay(model, choices):
        assert recorded(model, inputs).indices.equal(choices.indices)


MISTAKES = {
    "of .* layers": lambda c: RouterChoices(c.indices[:, :, :1], c.experts),
    "among": lambda c: RouterChoices(c.indices, (8, 8)),
    "experts per token": lambda c: RouterChoices(c.indices[..., :1], c.experts),
    r"has expert 4 in layer 1": lambda c: RouterChoices(edited(c.indices, (0, 2, 1, 1), 4), c.experts),
    r"has expert -2": lambda c: RouterChoices(edited(c.indices, (0, 2, 1), -2), c.experts),
    "beside experts": lambda c: RouterChoices(edited(c.indices, (1, 2, 1, 0), -1), c.experts),
    "expected whole numbers": lambda c: RouterChoices(c.indices.float(), c.experts),
    "twice in layer 0: .* Give -1": lambda c: RouterChoices(torch.zeros_like(c.indices), c.experts),
    "torch.bool": lambda c: RouterChoices(c.indices > 0, c.experts),
    "expected RouterChoices": lambda c: c.indices,
    "indices: expected a tensor .*, not list": lambda c: RouterChoices(c.indices.tolist(), c.experts),
    "experts are 4; give": lambda c: RouterChoices(c.indices, 4),
    r"this forward is of \[3, 9\]": lambda c: RouterChoices(c.indices[:, :-1], c.experts),
}


def edited(indices, place, value):
    indices = indices.clone()
    indices[place] = value
    return indices


@pytest.mark.parametrize("says", MISTAKES)
def test_choices_that_do_not_fit_are_refused_with_what_is_here(says):
    model = made("qwen3_moe")
    choices = recorded(model, {"input_ids": IDS})
    with pytest.raises(RouterReplayError, match=says), router_replay(model, MISTAKES[says](choices)):
        model(IDS)
    model(IDS)  # and nothing of it is left


def test_experts_with_adapters_are_replayed():
    from peft import LoraConfig, get_peft_model

    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = LoraConfig(target_modules=["q_proj"], target_parameters=names, init_lora_weights=False)
    model, inputs = get_peft_model(made("qwen3_moe"), config), {"input_ids": IDS}
    choices = recorded(made("qwen3_moe", seed=7), inputs)
    with router_replay(model, choices):
        assert recorded(model, inputs).indices.equal(choices.indices)
        assert step(model, inputs)[0].isfinite()


def test_masks_that_do_not_fit_are_refused():
    choices = recorded(made("qwen3_moe"), {"input_ids": IDS})
    with pytest.raises(RouterReplayError, match="the mask is"):
        choices.packed(LEFT)
    for lay_out in (choices.packed, choices.padded):
        with pytest.raises(RouterReplayError, match="the mask: expected a tensor"):
            lay_out(RIGHT.tolist())
        for mask in (torch.where(RIGHT > 0, 0.0, -1e9), RIGHT[None]):  # one to be added keeps what this one drops
            with pytest.raises(RouterReplayError, match="the mask is .*: expected .* of 1 .kept. and 0"):
                lay_out(mask)
    with pytest.raises(RouterReplayError, match="the mask keeps 25 positions"):
        choices.padded(RIGHT)


def test_models_without_a_proven_router_are_refused():
    with pytest.raises(RouterReplayError, match="no layer in which a router chooses"):
        proven_routers(build("llama"))
    model = made("qwen3_moe")
    with pytest.raises(RouterReplayError, match="expected each as often, and at least once"):
        _ = recorded_nothing(model).choices


def recorded_nothing(model):
    with record_router(model) as found:
        pass
    return found


class Noisy(nn.Module):
    """As Mixtral's router, with one thing that is another."""

    def __init__(self, of, what):
        super().__init__()
        self.weight, self.top_k, self.what = of.weight, of.top_k, what

    def forward(self, hidden_states):
        logits = F.linear(hidden_states, self.weight)
        if self.what == "noise":
            logits = logits + torch.rand_like(logits)
        scores = logits.float().softmax(-1)
        values, indices = torch.topk(scores, self.top_k, dim=-1)
        if self.what == "weights of the best":
            values = scores.sort(-1, descending=True).values[:, : self.top_k]
        if self.what == "cube":
            values = values**3
        if self.what == "sorted":
            indices = scores.argsort(-1, descending=True)[:, : self.top_k]
        return logits, values / values.sum(-1, keepdim=True), indices


@pytest.mark.parametrize(
    "what, says",
    {
        "noise": "draws random numbers",
        "weights of the best": "through a given choice its weights",
        "cube": "fit no variant",
        "sorted": "not what a call of topk in it chose",
    }.items(),
)
def test_lookalikes_are_refused_for_what_they_do(what, says):
    block = made("mixtral").model.layers[0].mlp
    block.gate = Noisy(block.gate, what)
    chooser, why_not = prove_router(block, Readings())
    assert chooser is None and says in why_not, why_not


def test_experts_of_groups_that_training_left_out_would_get_no_weight_and_are_refused():
    """DeepSeek-V2 zeroes the scores of such groups, and takes the weights from what is left."""
    shape = {"moe_intermediate_size": 24, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 8}
    shape |= {"qk_nope_head_dim": 8, "num_key_value_heads": 4, "first_k_dense_replace": 0, "num_experts_per_tok": 2}
    shape |= {"n_routed_experts": 8, "n_group": 4, "topk_group": 2}
    [_, *_] = proven_routers(build("deepseek_v2", topk_method="greedy", **shape))
    with pytest.raises(RouterReplayError, match="through a given choice its weights or their gradients miss softmax"):
        proven_routers(build("deepseek_v2", topk_method="group_limited_greedy", **shape))


def test_a_block_that_gives_its_experts_other_indices_is_refused():
    class Shifted(type(made("mixtral").model.layers[0].mlp)):
        def forward(self, hidden_states):
            rows = hidden_states.view(-1, hidden_states.shape[-1])
            _, weights, indices = self.gate(rows)
            return self.experts(rows, (indices + 1) % 4, weights).view(hidden_states.shape)

    block = made("mixtral").model.layers[0].mlp
    block.__class__ = Shifted
    chooser, why_not = prove_router(block, Readings())
    assert chooser is None and "not what it gives as indices" in why_not


RANKS = """
from routers_by_hand import report_ranks
report_ranks({folder!r})
"""


@pytest.mark.thorough
def test_over_two_ranks_that_share_the_experts(tmp_path):
    pytest.importorskip("transformers.distributed.expert_parallel")
    run_ranks(RANKS.format(folder=str(tmp_path)), 2)
