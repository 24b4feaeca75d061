"""A bound model generates from every kind of cache what it generates unbound, and from any part of a prompt."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoModelForSeq2SeqLM,
    BartConfig,
    DynamicCache,
    StaticCache,
    T5Config,
)

from models import assert_equal_steps, build, tokens
from veomni_core import bind
from veomni_core.errors import ConformanceError
from veomni_transformers.attention.mask_builders import padding_and_written_keys

LAYERS = {"layer_types": ["linear_attention", "full_attention"] * 2, "num_hidden_layers": 4}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
# With router logits transformers' own model fails from the second token on: its load-balancing loss takes the mask of
# all tokens, and the router logits of the new ones.
ROUTERS = {"output_router_logits": False}
BAMBA = {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
SIZES = {
    "llama": {},
    "gemma3_text": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "qwen3": {"num_attention_heads": 8, "num_key_value_heads": 1},
    "qwen3_moe": ROUTERS,
    "phi3": {},
    "mistral": {"sliding_window": 6},
    "mixtral": ROUTERS,
    "deepseek_v3": {},
    "cohere2": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "bamba": BAMBA,
    "qwen3_next": {**LAYERS, **LINEAR, **EXPERTS, "shared_expert_intermediate_size": 24},
}
BART = {
    "vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip
T5 = {
    "vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0,
    "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
ENCODER_DECODERS = {"bart": BartConfig(**BART), "t5": T5Config(**T5)}
CACHES = {
    "static": {"cache_implementation": "static"},
    "dynamic": {},
    "prompt in parts": {"prefill_chunk_size": 4},
    "prompt in parts, static": {"prefill_chunk_size": 4, "cache_implementation": "static"},
    "beams": {"num_beams": 2},
    "static beams": {"num_beams": 2, "cache_implementation": "static"},
    "fp8": {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}},
    **{
        backend: {"cache_implementation": "quantized", "cache_config": {"backend": backend, "q_group_size": 8}}
        for backend in ("quanto", "hqq")
    },
    "no cache": {"use_cache": False},
}
OFFLOADED = ("offloaded", "offloaded_static")
THOROUGH = [
    pytest.param(
        family, cache, own, marks=[] if (family, cache, own) == ("llama", "static", "sdpa") else pytest.mark.thorough
    )
    for family in (*SIZES, *ENCODER_DECODERS)
    for cache in CACHES
    for own in ("sdpa", "eager")
]
ATTENTION = {"preset": "eager", "attn_implementation": "sdpa"}


def model(family, own="sdpa"):
    if family in ENCODER_DECODERS:
        torch.manual_seed(0)
        made = AutoModelForSeq2SeqLM.from_config(ENCODER_DECODERS[family])
    else:
        made = build(family, **SIZES[family])
    made.set_attn_implementation(own)
    return made.eval()


def generated(which, mask, cache):
    return which.generate(
        tokens(2, 11), attention_mask=mask, max_new_tokens=4, do_sample=False, pad_token_id=0, output_logits=True,
        return_dict_in_generate=True, **cache,
    )  # fmt: skip


def left_padded():
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[0, :4] = 0
    return mask


@pytest.mark.parametrize(("family", "cache", "own"), THOROUGH)
@pytest.mark.parametrize("padded", [False, True])
def test_generation_from_each_cache_is_the_models_own(family, cache, own, padded):
    mask, bound, unbound = (
        left_padded() if padded else torch.ones_like(left_padded()),
        model(family, own),
        model(family, own),
    )
    try:
        wanted = generated(unbound, mask, CACHES[cache])
    except (ImportError, ValueError) as error:
        pytest.skip(f"transformers refuses it: {error}")
    with bind(bound, ATTENTION):
        found = generated(bound, mask, CACHES[cache])
    assert torch.equal(found.sequences, wanted.sequences)
    for mine, theirs in zip(found.logits, wanted.logits, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
def test_transformers_own_router_loss_fails_in_generation():
    """Why generation is asked without router logits. Once this passes, ``ROUTERS`` can go."""
    with pytest.raises(RuntimeError, match="must match the size"):
        generated(build("qwen3_moe").eval(), left_padded(), {})


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("family", ["llama", *(pytest.param(f, marks=pytest.mark.thorough) for f in [*SIZES][1:])])
def test_a_step_after_a_cached_prompt_trains_as_the_models_own(family, static):
    """The cache holds keys of the prompt, or states; the step's labels are those of what follows."""

    def trained(which):
        config, ids = which.config, tokens(2, 11)
        cache = StaticCache(config=config, max_cache_len=16) if static else DynamicCache(config=config)
        with torch.no_grad():
            which(input_ids=ids[:, :6], past_key_values=cache, use_cache=True)
        loss = which.train()(input_ids=ids[:, 6:], labels=ids[:, 6:], past_key_values=cache, use_cache=True).loss
        loss.backward()
        return loss.detach(), {name: p.grad for name, p in which.named_parameters() if p.grad is not None}

    bound = model(family)
    try:
        wanted = trained(model(family))
    except (RuntimeError, ValueError) as error:
        pytest.skip(f"transformers' own model doesn't train so: {error}")
    with bind(bound, {"preset": "auto"}):
        assert_equal_steps(trained(bound), wanted)


@pytest.mark.thorough
@pytest.mark.parametrize("family", ENCODER_DECODERS)
@pytest.mark.parametrize("own", ["sdpa", "eager"])
def test_encoder_decoders_train_as_unbound(family, own):
    def trained(which):
        ids, mask = tokens(2, 11), left_padded()
        loss = which.train()(input_ids=ids, attention_mask=mask, labels=tokens(2, 7, seed=3)).loss
        loss.backward()
        return loss.detach(), {name: p.grad for name, p in which.named_parameters() if p.grad is not None}

    bound, unbound = model(family, own), model(family, own)
    for each in (bound, unbound):
        for module in each.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
            elif isinstance(getattr(module, "dropout", None), float):
                module.dropout = 0.0
    with bind(bound, {"preset": "auto"}):
        assert_equal_steps(trained(bound), trained(unbound))


@pytest.mark.gpu
@pytest.mark.thorough
@pytest.mark.parametrize("cache", OFFLOADED)
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_generation_from_offloaded_caches_is_the_models_own(family, cache):
    bound, unbound, ids = model(family).cuda(), model(family).cuda(), tokens(2, 11).cuda()
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "cache_implementation": cache}
    options["disable_compile"] = True  # torch 2.11's Dynamo ended the process on the cache's streams
    with bind(bound, ATTENTION):
        assert torch.equal(bound.generate(ids, **options), unbound.generate(ids, **options))


def in_parts(which, cache, *, lengths=(5, 3, 1), mask=None):
    parts, end = [], 0
    for part in tokens(2, sum(lengths)).split(lengths, dim=1):
        end += part.shape[1]
        given = {} if mask is None else {"attention_mask": mask(end)}
        with torch.no_grad():
            parts.append(which(input_ids=part, past_key_values=cache, use_cache=True, **given).logits)
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("static", [True, False], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    "family",
    ["llama", "gemma3_text", *(pytest.param(f, marks=pytest.mark.thorough) for f in ("qwen3_moe", "qwen3_next"))],
)
def test_several_tokens_after_several_are_the_models_own(family, static):
    """At first transformers passes no mask for an empty static cache, whose slots no token may see."""
    bound, unbound = model(family), model(family)

    def cache(config):
        return StaticCache(config=config, max_cache_len=16) if static else DynamicCache(config=config)

    wanted = in_parts(unbound, cache(unbound.config))
    with bind(bound, ATTENTION):
        torch.testing.assert_close(in_parts(bound, cache(bound.config)), wanted, rtol=1e-4, atol=1e-5)
        whole = in_parts(bound, cache(bound.config), lengths=(9,))
    torch.testing.assert_close(whole, wanted, rtol=1e-4, atol=1e-5)


def test_verify_asks_a_static_cache(monkeypatch):
    """The contract's samples are kept from finding it here; they do, too."""
    import veomni_conformance.bound_models.verification as verification

    monkeypatch.setattr(verification, "_check", lambda spec, *_: str(spec))
    monkeypatch.setattr("veomni_torch.attention.sdpa_attention_forward", _misaligned)
    with pytest.raises(ConformanceError, match="with a static cache, the result is off"):
        bind(model("llama"), ATTENTION, verify=True)


def _misaligned(module, query, key, value, attention_mask, **options):
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if attention_mask is None and query.shape[2] > 1:
        attention_mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(key.shape[2] - query.shape[2])
        attention_mask = attention_mask.expand(query.shape[0], 1, -1, -1)
    return sdpa_attention_forward(module, query, key, value, attention_mask, **options)


@pytest.mark.parametrize(
    ("lengths", "padding", "wanted"),
    [
        ({"q_length": 5, "kv_length": 16, "q_offset": torch.tensor(0)}, None, torch.ones(2, 5)),
        ({"q_length": 1, "kv_length": 16, "q_offset": torch.tensor(8)}, torch.ones(2, 16), torch.ones(2, 9)),
        ({"q_length": 3, "kv_length": 8, "q_offset": 5}, None, None),
        ({"q_length": 3, "kv_length": 6, "q_offset": 5, "kv_offset": 2}, torch.ones(2, 8), None),
        ({"q_length": 7, "kv_length": 11, "allow_is_bidirectional_skip": True}, None, None),  # an encoder's keys
    ],
    ids=["an empty static cache", "all slots in the mask", "a cache that grows", "a window", "across"],
)
def test_flash_attention_masks_end_where_unwritten_keys_begin(lengths, padding, wanted):
    found = padding_and_written_keys(
        batch_size=2, attention_mask=None if padding is None else padding.bool(), **lengths
    )
    assert (found is None) if wanted is None else torch.equal(found, wanted.bool())
