"""Attention is bound where it was seen to compute the contract's attention, over the keys that eager attention sees."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import (
    BigBirdPegasusConfig,
    BigBirdPegasusForConditionalGeneration,
    InformerConfig,
    InformerForPrediction,
    NllbMoeConfig,
    NllbMoeForConditionalGeneration,
    PegasusXConfig,
    PegasusXForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    XmodConfig,
    XmodForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaAttention, eager_attention_forward

from models import FAMILIES, assert_same_bits, build, step, tokens
from planned_norms import vouching
from veomni_conformance.given_kernels import definitions
from veomni_core import KernelSpec, bind
from veomni_core.discovery.registry import PluginRecord, build_registry
from veomni_core.errors import BindingError, KernelUnavailableError
from veomni_ops.attention import MASK_FEATURES
from veomni_transformers.attention.locator import AttentionInterface
from veomni_transformers.proving.functions import with_globals

SMALL = {
    "vocab_size": 96, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "dropout": 0.0,
    "attention_dropout": 0.0, "activation_dropout": 0.0, "max_position_embeddings": 64, "decoder_start_token_id": 0,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EAGER_ONLY = {
    BigBirdPegasusForConditionalGeneration: BigBirdPegasusConfig(**SMALL),
    NllbMoeForConditionalGeneration: NllbMoeConfig(
        **SMALL, num_experts=4, encoder_layerdrop=0.0, decoder_layerdrop=0.0
    ),
    PegasusXForConditionalGeneration: PegasusXConfig(**SMALL),
}


def sites(model):
    return list(AttentionInterface().find(model, "attention interface"))


def site(model):
    (only,) = sites(model)
    return only


def registry(**of_sdpa):
    features = of_sdpa.pop("features", ("dense_mask", "dropout", "odd_heads", "position_bias", "sdpa_mask"))
    factory = "transformers.integrations.sdpa_attention:sdpa_attention_forward"
    specs = (KernelSpec("sdpa", "attention", "standard", factory, features=features, **of_sdpa),)
    record = PluginRecord("one", "veomni-one", "1.0", __name__, kernels=specs)
    return vouching(build_registry([*definitions(), record], {}), *specs, distribution="veomni-one")


def bind_attention(model, asked="auto", **of_sdpa):
    return bind(model, {"preset": "eager", "attn_implementation": asked}, registry=registry(**of_sdpa))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_attention_of_decoders_is_proven_for_every_kind_of_mask(family):
    found = site(build(family))
    assert found.variant == "standard" and not found.declared and not found.refuses
    assert "reference's values and gradients" in found.evidence
    assert found.dtype == "float32" and found.sizes["value_head_dim"] == (8,)


def test_encoders_decoders_and_what_crosses_are_proven():
    small = {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
    found = sites(T5ForConditionalGeneration(T5Config(**small)))
    assert [each.path for each in found] == ["encoder", "decoder"]
    for each in found:
        assert each.variant == "standard" and not each.declared
        assert each.needs == ("position_bias", "dense_mask") and list(each.refuses) == ["flash_attention_mask"]


@pytest.mark.parametrize("kind", EAGER_ONLY, ids=lambda kind: kind.__name__)
def test_a_model_that_transformers_runs_eagerly_only_stays_eager(kind):
    torch.manual_seed(0)
    model = kind(EAGER_ONLY[kind]).eval()
    ids = tokens()
    wanted = model(input_ids=ids, labels=ids).loss
    with pytest.raises(KernelUnavailableError, match="_supports_sdpa = False"):
        bind_attention(model, "sdpa")
    binding = bind_attention(model)
    (decision,) = [d for op in binding.plan.ops for d in op.sites if op.op_name == "attention"]
    assert not decision.bound and f"{kind.__name__}'s attention" in decision.reason
    assert torch.equal(model(input_ids=ids, labels=ids).loss, wanted)


def informer():
    config = InformerConfig(
        prediction_length=6, context_length=12, d_model=16, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16,
        lags_sequence=[1, 2], num_time_features=1,
    )  # fmt: skip
    return InformerForPrediction(config)


def test_an_eager_only_model_without_tokens_stays_eager():
    assert "eagerly only" in site(informer()).evidence


def test_a_decoder_that_is_causal_by_its_mask_alone_is_refused_whatever_its_class_says(monkeypatch):
    for flag in ("_supports_sdpa", "_supports_flash_attn", "_supports_flex_attn"):
        monkeypatch.setattr(PegasusXForConditionalGeneration, flag, True, raising=False)
        for base in PegasusXForConditionalGeneration.__mro__:
            if flag in vars(base):
                monkeypatch.setattr(base, flag, True)
    found = site(PegasusXForConditionalGeneration(EAGER_ONLY[PegasusXForConditionalGeneration]))
    assert found.variant is None and "PegasusXAttention gets no mask and is not causal by itself" in found.evidence


def test_attention_that_is_set_to_not_causal_is_refused():
    model = build("llama")
    model.model.layers[1].self_attn.is_causal = False
    assert site(model).variant is None
    with pytest.raises(KernelUnavailableError, match="gets no mask and is not causal by itself"):
        bind_attention(model, "sdpa")


def _hotter(module, query, key, value, attention_mask, scaling, **options):
    return eager_attention_forward(module, query, key, value, attention_mask, 1.1 * scaling, **options)


def _without_first_head(module, query, key, value, attention_mask, scaling, **options):
    output, weights = eager_attention_forward(module, query, key, value, attention_mask, scaling, **options)
    return torch.cat([torch.zeros_like(output[:, :, :1]), output[:, :, 1:]], dim=2), weights


def _detached(module, query, key, value, attention_mask, scaling, **options):
    return eager_attention_forward(module, query, key.detach(), value, attention_mask, scaling, **options)


@pytest.mark.parametrize(
    ("function", "what"),
    [(_hotter, "values miss by"), (_without_first_head, "values miss by"), (_detached, "gradients differ")],
    ids=["scaled", "a head left out", "no gradient of keys"],
)
def test_an_eager_function_that_computes_something_else_is_refused(function, what):
    class Attention(LlamaAttention):
        forward = with_globals(LlamaAttention.forward, {"eager_attention_forward": function})

    model = build("llama", attn_implementation="eager")
    model.model.layers[1].self_attn.__class__ = Attention
    wanted = step(copy.deepcopy(model))
    found = site(model)
    assert found.variant is None and f"not standard: its {what.split()[0]}" in found.evidence and what in found.evidence
    bind_attention(model)
    assert_same_bits(step(model), wanted)


def test_a_window_that_a_kernel_would_read_otherwise_than_the_mask_is_refused_for_that_mask():
    model = build("gemma3_text", sliding_window=5)
    assert not site(model).refuses
    model.model.layers[0].self_attn.sliding_window = 4
    assert list(site(model).refuses) == ["flash_attention_mask"]


def test_sinks_and_softcaps_are_needed_and_transformers_word_is_kept():
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    with_sinks, with_softcap = site(build("gpt_oss", **experts)), site(build("gemma2"))
    assert with_sinks.variant == with_softcap.variant == "standard"
    assert with_sinks.needs == ("sinks",) and with_softcap.needs == ("softcap",)
    assert list(with_sinks.refuses) == list(with_softcap.refuses) == ["sdpa_mask"]


def test_a_kernel_that_does_not_say_whose_masks_it_takes_is_stopped_before_the_first_step():
    model = build("gemma2")
    with pytest.raises(BindingError, match="sdpa_mask"):
        bind_attention(model, "sdpa", features=("softcap", "dense_mask"))
    assert model.config._attn_implementation == "eager"


def test_dtypes_and_head_widths_are_refused_at_planning():
    model = build("llama")
    with pytest.raises(KernelUnavailableError, match="computes bfloat16, this site is float32"):
        bind_attention(model, "sdpa", dtypes=("bfloat16",))
    model = build("llama", head_dim=12)
    with pytest.raises(KernelUnavailableError, match="does not compute odd_heads"):
        bind_attention(model, "sdpa", features=("dense_mask", "sdpa_mask"))
    assert site(build("llama", head_dim=264)).needs == ("wide_heads",)


def test_a_model_that_can_not_be_run_in_small_is_bound_on_transformers_word_and_says_so():
    small = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    found = site(XmodForCausalLM(XmodConfig(**small, vocab_size=64, is_decoder=True, languages=["en_XX", "de_DE"])))
    assert found.variant == "standard" and found.declared and not found.examined
    assert "declared by transformers (_supports_sdpa" in found.evidence and "could not be run" in found.evidence
    assert found.dtype == "float32" and found.sizes["head_dim"] == (12,) and found.needs == ("odd_heads",)


def test_finding_attention_changes_nothing():
    model = build("gemma3_text").eval()
    before = {path: dict(vars(module)) for path, module in model.named_modules()}
    configs = copy.deepcopy(vars(model.config))
    state = torch.random.get_rng_state()
    sites(model)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert {path: dict(vars(module)) for path, module in model.named_modules()} == before
    assert vars(model.config) == configs


def test_every_family_of_masks_has_a_feature_of_its_own():
    assert len(set(MASK_FEATURES.values())) == len(MASK_FEATURES) == 3
