"""DeepSeek's sparse attention: bound equals eager in each model type that has it; the indexer learns if asked to."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch.nn import functional as F

from veomni_core import bind, find_sites
from veomni_core.errors import VeOmniError
from veomni_ops.visible_keys import as_mask
from veomni_transformers.forwards.sparse_masks import as_bools, is_ranges, with_ranges

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "qk_nope_head_dim": 16,
    "index_topk": 6,
    "index_head_dim": 16,
    "index_n_heads": 16,  # so many that no key has the score 0 for all of them: no ties
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
TYPES = {
    "deepseek_v32": {},
    "glm_moe_dsa": {"num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"]},
    "axk2": {"gated_norm_rank": 4},
    "dots3_note_text": {},
}
BOTH = {"preset": "eager", "dsa_attention_implementation": "torch", "dsa_indexer_implementation": "torch"}
FIELDS = tuple(BOTH)[1:]


def made(model_type, attention="eager", **changes):
    torch.manual_seed(0)
    settings = {**SMALL, **TYPES.get(model_type, {}), **changes}
    if model_type == "dots3_note_text":
        from transformers.models.dots3_note import modeling_dots3_note as dots

        config = dots.Dots3NoteTextConfig(**settings)
        config._attn_implementation = attention
        model = dots.Dots3NoteForCausalLM(config)
    else:
        config = transformers.AutoConfig.for_model(model_type, **settings)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    for parameter in model.parameters():  # as initialized, some are so small that a wrong gradient of them is too
        torch.nn.init.normal_(parameter, std=0.2) if parameter.dim() > 1 else None
    return model


def sites(model):
    return [site for site in find_sites(model) if site.op_name.startswith("dsa_")]


def step(model, **inputs):
    tokens = torch.randint(3, 64, (2, 21), generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    loss = model(input_ids=tokens, labels=tokens, use_cache=False, **inputs).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_alike(mine, theirs):
    torch.testing.assert_close(mine[0], theirs[0], rtol=1e-6, atol=0)
    assert mine[1].keys() == theirs[1].keys()
    for name, gradient in mine[1].items():
        assert (gradient - theirs[1][name]).norm() <= 2e-5 * theirs[1][name].norm() + 1e-9, name


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("model_type", TYPES)
def test_bound_equals_eager(model_type, attention):
    model = made(model_type, attention)
    assert all(site.variant == "standard" for site in sites(model)), [site.evidence for site in sites(model)]
    eager = step(model)
    for fields in ((*FIELDS,), FIELDS[:1], FIELDS[1:]):  # both, and each beside the model's own code for the other
        with bind(model, {"preset": "eager", **dict.fromkeys(fields, "torch")}):
            assert_alike(step(model), eager)
    assert_alike(step(model), eager)
    assert not any("indexer" in name for name in eager[1])


def test_the_receipt_does_not_say_that_sdpa_runs_where_sparse_attention_does():
    receipt = bind(made("deepseek_v32", "sdpa"), {"preset": "auto", "dsa_attention_implementation": "torch"}).receipt
    (attention,) = [op for op in receipt.to_dict()["ops"] if op["op"] == "attention"]
    assert (attention["bound"], attention["eager"][0]["runs"]) == (0, "sdpa")
    text = " ".join(str(receipt).replace("│", " ").split())
    assert "the model is set to sdpa" in text and "runs there" not in text


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("model_type", ["deepseek_v32", "glm_moe_dsa"])
def test_packed_and_padded(model_type):
    model = made(model_type, "sdpa")
    positions = torch.cat([torch.arange(4), torch.arange(3), torch.arange(14)]).repeat(2, 1)
    mask = torch.ones(2, 21, dtype=torch.long)
    mask[1, 15:] = 0  # to the right, where every query sees some key
    for inputs in ({"position_ids": positions}, {"attention_mask": mask}):
        eager = step(model, **inputs)
        with bind(model, BOTH):
            assert_alike(step(model, **inputs), eager)


def test_a_cache_is_used_as_by_the_model():
    model = made("deepseek_v32", "sdpa").eval()
    tokens = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    wanted = model.generate(tokens, max_new_tokens=8, do_sample=False, eos_token_id=None)
    with bind(model, BOTH):
        assert torch.equal(model.generate(tokens, max_new_tokens=8, do_sample=False, eos_token_id=None), wanted)


def learning(weight):
    kernel = {"kernel": "torch", "options": {"indexer_loss": weight}}
    return {**BOTH, "dsa_attention_implementation": kernel}


def test_the_indexer_learns_from_its_loss_alone():
    model = made("deepseek_v32")
    eager = step(model)
    with bind(model, learning(0.5)):
        loss, gradients = step(model)
        learned = {name: gradient for name, gradient in gradients.items() if ".indexer." in name}
        assert_alike((loss, {name: each for name, each in gradients.items() if name not in learned}), eager)
    assert len(learned) == 2 * 5
    assert all(gradient.abs().max() > 0 for name, gradient in learned.items() if "k_norm.bias" not in name)
    for layer in range(2):
        exact = exact_gradients(model, layer, 0.5)
        for name, gradient in exact.items():
            mine = learned[f"model.layers.{layer}.self_attn.indexer.{name}"].double()
            assert (mine - gradient).norm() <= 1e-4 * gradient.norm() + 1e-9, name


def accumulated(model, rows, counted=True, scale=1.0, **inputs):
    """The indexers' gradients of a step of eight sequences in micro-batches of ``rows``."""
    tokens = torch.randint(3, 64, (8, 21), generator=torch.Generator().manual_seed(1))
    words = torch.arange(21) < torch.tensor([[21, 9, 14, 21, 5, 17, 21, 11]]).T if counted else torch.ones(8, 21) > 0
    labels = torch.where(words, tokens, -100)
    items = int((labels[:, 1:] != -100).sum()) if counted else None
    model.zero_grad()
    for mask, each, wanted in zip(*(x.split(rows) for x in (words.long(), tokens, labels)), strict=True):
        given = {"attention_mask": mask, "num_items_in_batch": items} if counted else {}
        loss = model(input_ids=each, labels=wanted, use_cache=False, **given, **inputs).loss
        (loss * scale).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None and ".indexer." in name}


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("model_type", ["deepseek_v32", "glm_moe_dsa", "dots3_note_text"])
def test_the_indexers_loss_is_a_mean_of_the_whole_step(model_type):
    model = made(model_type)
    with bind(model, learning(0.5)):
        whole = accumulated(model, 8)
        for rows in (4, 1):
            assert_close(accumulated(model, rows), whole)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        assert_close(accumulated(model.train(), 2), whole)
        model.gradient_checkpointing_disable()
        mean = accumulated(model, 8, counted=False)
        assert_close(accumulated(model, 2, counted=False, scale=1 / 4), mean)  # as trainers of four micro-batches do
        tripled = accumulated(model, 8, scale=3.0)  # as for three ranks whose gradients are averaged
        assert_close({name: each / 3 for name, each in tripled.items()}, whole)
        assert all(each.abs().max() > 0 for name, each in whole.items() if "k_norm.bias" not in name)


def assert_close(mine, theirs):
    assert mine.keys() == theirs.keys() != set()
    for name, gradient in mine.items():
        assert (gradient - theirs[name]).norm() <= 1e-5 * theirs[name].norm() + 1e-9, name


MASKS = {
    "plain": {},
    "packed": {"position_ids": torch.cat([torch.arange(4), torch.arange(3), torch.arange(14)]).repeat(2, 1)},
    "padding to the right": {"attention_mask": (torch.arange(21) < torch.tensor([[21], [15]])).long()},
    "padding to the left": {"attention_mask": (torch.arange(21) >= torch.tensor([[0], [6]])).long()},
    "holes": {"attention_mask": (torch.arange(21) != torch.tensor([[3], [5]])).long()},
}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("case", MASKS)
def test_ranges_say_what_the_mask_says(case, attention):
    from transformers.masking_utils import create_causal_mask

    config = made("deepseek_v32", attention).config
    call = {"config": config, "inputs_embeds": torch.zeros(2, 21, 32), "past_key_values": None, "attention_mask": None}
    call |= {"position_ids": torch.arange(21)[None], "allow_is_causal_skip": False} | MASKS[case]
    mask, found = create_causal_mask(**call), with_ranges(create_causal_mask)(**call)
    assert is_ranges(found) is (case != "holes")
    seen = as_mask(found[:, 0], 21) if is_ranges(found) else as_bools(found[:, 0])
    assert torch.equal(seen, as_bools(mask[:, 0]).expand_as(seen))
    skipped = with_ranges(create_causal_mask)(**{**call, "allow_is_causal_skip": True})  # for attention that is dense
    assert skipped is None or not is_ranges(skipped)


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("model_type", TYPES)
def test_no_mask_is_built_where_both_are_bound(model_type, monkeypatch):
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as builders

    model, built = made(model_type, "sdpa"), []
    for name in ("eager", "sdpa"):
        own = builders[name]
        monkeypatch.setitem(builders, name, lambda own=own, **call: built.append(call) or own(**call))
    for config, masks in (({"preset": "eager"}, True), (BOTH, False), ({**BOTH, FIELDS[1]: "eager"}, True)):
        with bind(model, config):
            built.clear()  # those of proofs
            step(model)
        indexed = [call for call in built if call["allow_is_causal_skip"] is False]
        assert bool(indexed) is masks, config


def exact_gradients(model, layer, weight):
    """The gradients of the KL divergence of one layer, in float64, from its own eager probabilities and scores."""
    attention, kept = model.model.layers[layer].self_attn, {}
    hook = attention.register_forward_hook(
        lambda module, args, kwargs, output: kept.update(kwargs, weights=output[1].detach()), with_kwargs=True
    )
    step(model)
    hook.remove()
    hidden = kept["hidden_states"].detach().double()
    cos, sin = (each.double() for each in kept["position_embeddings"])
    latent = attention.q_a_layernorm(attention.q_a_proj(kept["hidden_states"])).detach().double()
    weights = {name: p.detach().double().requires_grad_() for name, p in attention.indexer.named_parameters()}

    def rotated(x):
        first, rest = x[..., :8], x[..., 8:]
        turned = torch.cat([-first[..., 4:], first[..., :4]], dim=-1)
        return torch.cat([first * cos.unsqueeze(2) + turned * sin.unsqueeze(2), rest], dim=-1)

    query = rotated((latent @ weights["wq_b.weight"].T).unflatten(-1, (16, 16)))
    key = F.layer_norm(hidden @ weights["wk.weight"].T, (16,), weights["k_norm.weight"], weights["k_norm.bias"], 1e-6)
    products = torch.einsum("bthd,bsd->bths", query, rotated(key.unsqueeze(2)).squeeze(2)).relu()
    heads = hidden @ weights["weights_proj.weight"].T
    scores = torch.einsum("bths,bth->bts", products, heads) / 16  # the root of 16 heads of 16 columns
    target = kept["weights"].double().mean(1)
    chosen = target > 0
    log_found = scores.masked_fill(~chosen, -torch.inf).log_softmax(-1).masked_fill(~chosen, 0.0)
    loss = (torch.xlogy(target, target) - target * log_found).sum(-1).mean() * weight
    return dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))


@pytest.mark.parametrize("frozen", [False, True], ids=["all trained", "the rest frozen"])
def test_in_the_dense_stage_all_keys_are_seen_and_learned(frozen):
    model, all_chosen = made("deepseek_v32"), made("deepseek_v32", index_topk=64)
    all_chosen.load_state_dict(model.state_dict())
    config = learning(0.5)
    config["dsa_attention_implementation"]["options"]["indexer_stage"] = "dense"
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or ".indexer." in name)
    wanted, gradients = step(all_chosen)
    assert not torch.equal(step(made("deepseek_v32"))[0], wanted)
    with bind(model, config) as binding:
        assert "dense" in str([kernel.spec.settings for kernel in binding.plan.kernels])
        loss, found = step(model)
    learned = {name: each for name, each in found.items() if ".indexer." in name}
    assert_alike(
        (loss, {name: each for name, each in found.items() if name not in learned}),
        (wanted, {} if frozen else gradients),
    )
    for layer in range(2):
        for name, gradient in exact_gradients(all_chosen, layer, 0.5).items():
            mine = learned[f"model.layers.{layer}.self_attn.indexer.{name}"].double()
            assert (mine - gradient).norm() <= 1e-4 * gradient.norm() + 1e-9, name


def test_training_moves_the_indexer_to_what_attention_sees():
    model = made("deepseek_v32")
    with bind(model, learning(1.0)):
        indexers = [p for name, p in model.named_parameters() if ".indexer." in name]
        before = [p.detach().clone() for p in indexers]
        optimizer = torch.optim.Adam(indexers, lr=1e-2)
        for _ in range(3):
            step(model)
            optimizer.step()
    assert not any(torch.equal(p, former) for p, former in zip(indexers, before, strict=True))


def test_the_plan_says_whether_the_indexer_learns():
    site = next(site for site in sites(made("deepseek_v32")) if site.op_name == "dsa_attention")
    assert "indexer's parameters get no gradient, as in eager code, unless" in site.left_out[""]


def test_sinks_and_dropout_are_refused():
    for model, words in ((made("hy_v4"), "sinks"), (made("deepseek_v32", attention_dropout=0.1), "dropout")):
        with pytest.raises(VeOmniError, match=words):
            bind(model, {"preset": "eager", "dsa_attention_implementation": "torch"})


V4 = {
    "num_hidden_layers": 2,
    "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
    "head_dim": 16,
    "index_topk": 3,
    "sliding_window": 6,
    "o_groups": 2,
    "o_lora_rank": 8,
    "hc_mult": 2,
    "num_key_value_heads": 1,
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
}


@pytest.mark.thorough(one_per=[])
def test_deepseek_v4_chooses_compressed_keys_by_a_kernel_and_attends_to_them_itself():
    model = made("deepseek_v4", **V4)
    attention, indexer = sorted(sites(model), key=lambda site: site.op_name)
    assert (indexer.path, indexer.variant) == ("model.layers.0.self_attn.compressor.indexer", "standard"), indexer
    assert attention.variant is None and "a window of keys and to sinks" in attention.evidence
    eager = step(model)
    tokens = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    generate = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    wanted = model.eval().generate(tokens, **generate)
    with bind(model, {"preset": "eager", FIELDS[1]: "torch"}):
        assert torch.equal(model.generate(tokens, **generate), wanted)
        assert_alike(step(model.train()), eager)
    with pytest.raises(VeOmniError, match="sinks"):
        bind(model, {"preset": "eager", FIELDS[0]: "torch"})


def test_another_indexer_is_refused(monkeypatch):
    from transformers.models.deepseek_v32 import modeling_deepseek_v32

    forward = modeling_deepseek_v32.DeepseekV32Indexer.forward

    def doubled(self, hidden_states, *args, **kwargs):
        return forward(self, 2 * hidden_states, *args, **kwargs)  # the norm hides it from keys, and not from weights

    monkeypatch.setattr(modeling_deepseek_v32.DeepseekV32Indexer, "forward", doubled)
    assert all(site.variant is None for site in sites(made("deepseek_v32")))
