"""Towers' attention is proven by running it on pictures and sounds; code that looks like it is refused."""

from __future__ import annotations

import functools

import pytest
import torch
from tiny_multimodal import CONFIGS
from tiny_multimodal import tiny_model as tiny
from transformers import CONFIG_MAPPING
from transformers.models.qwen2_vl import modeling_qwen2_vl
from transformers.models.siglip import modeling_siglip

from veomni_transformers.attention.locator import AttentionInterface, readers_by_owner
from veomni_transformers.coverage import _built, model_types
from veomni_transformers.proving.functions import global_functions, with_globals
from veomni_transformers.proving.probe import quiet

ALIKE = ["gemma3", "glm4v", "llava", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "paligemma", "internvl"]


def towers_site(model):
    sites = AttentionInterface().find(model, "attention interface")
    return next(site for site in sites if "visual" in site.path or "vision" in site.path)


@pytest.mark.parametrize(
    "family", ["qwen2_5_vl", *(pytest.param(name, marks=pytest.mark.thorough) for name in ALIKE if name in CONFIGS)]
)
def test_every_attention_beside_the_text_is_proven(family):
    sites = list(AttentionInterface().find(tiny(family), "attention interface"))
    beside = [site for site in sites if "language_model" not in site.path]
    assert beside
    for site in beside:
        assert site.variant == "standard" and site.examined and not site.declared, site.evidence


def _planted(model, kind, forward):
    lookalike = type(f"Planted{kind.__name__}", (kind,), {"forward": forward})
    planted = [module for module in model.modules() if type(module) is kind]
    for module in planted:
        module.__class__ = lookalike
    assert planted
    return model


SOURCE = """
def forward(self, hidden_states, cu_seqlens, position_embeddings=None, max_seqlen=None, **kwargs):
    length = hidden_states.shape[0]
    query, key, value = self.qkv(hidden_states).reshape(length, 3, self.num_heads, -1).permute(1, 0, 2, 3).unbind(0)
    query, key = apply_rotary_pos_emb_vision(query, key, *position_embeddings)
    query, key, value = (each.transpose(0, 1).unsqueeze(0) for each in (query, key, value))
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
    options = dict(scaling=self.scaling, dropout=0.0, is_causal=False)
    if self.config._attn_implementation == "flash_attention_2":
        longest = (cu_seqlens[1:] - cu_seqlens[:-1]).max()
        options |= dict(cu_seq_lens_q=cu_seqlens, cu_seq_lens_k=cu_seqlens)
        options |= dict(max_length_q=longest, max_length_k=longest)
        {planted}
        output = attend(self, query, key, value, attention_mask=None, **options)[0]
    else:
        lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
        parts = [torch.split(each, lengths, dim=2) for each in (query, key, value)]
        output = [attend(self, *each, attention_mask=None, **options)[0] for each in zip(*parts)]
        output = torch.cat(output, dim=1)
    return self.proj(output.reshape(length, -1).contiguous())
"""
LOOKALIKES = {
    "scale": "options['scaling'] = 1.1 * self.scaling",
    "no bounds": "options |= dict(cu_seq_lens_q=None, cu_seq_lens_k=None)",
    "other bounds": "options |= dict.fromkeys(('cu_seq_lens_q', 'cu_seq_lens_k'), cu_seqlens[[0, -1]])",
    "order of heads": "key = key.flip(1)",
    "causal": "options['is_causal'] = True",
    "no gradient": "key = key.detach()",
}


def _written(planted):
    namespace = dict(vars(modeling_qwen2_vl))
    exec(SOURCE.format(planted=planted), namespace)
    return namespace["forward"]


def test_code_that_splits_at_the_bounds_of_pictures_is_proven_for_kernels_that_take_the_bounds():
    site = towers_site(_planted(tiny("qwen2_vl"), modeling_qwen2_vl.VisionAttention, _written("pass")))
    assert site.variant == "standard" and not site.declared
    assert "flash_attention_mask" not in site.refuses


@pytest.mark.parametrize("kind", LOOKALIKES)
def test_what_kernels_by_lengths_would_be_given_otherwise_is_refused(kind):
    site = towers_site(_planted(tiny("qwen2_vl"), modeling_qwen2_vl.VisionAttention, _written(LOOKALIKES[kind])))
    assert "flash_attention_mask" in site.refuses, site.evidence
    assert "its own forward gives" in site.refuses["flash_attention_mask"]


def _hotter(module, query, key, value, attention_mask, scaling, **options):
    return modeling_siglip.eager_attention_forward(module, query, key, value, attention_mask, 1.1 * scaling, **options)


def _masked(module, query, key, value, attention_mask, scaling, **options):
    mask = torch.full((query.shape[2], key.shape[2]), torch.finfo(query.dtype).min).triu(1).to(query.dtype)
    return modeling_siglip.eager_attention_forward(module, query, key, value, mask[None, None], scaling, **options)


@pytest.mark.parametrize("function", [_hotter, _masked], ids=["scale", "causal"])
def test_a_tower_whose_eager_function_computes_something_else_is_refused(function):
    forward = with_globals(modeling_siglip.SiglipAttention.forward, {"eager_attention_forward": function})
    site = towers_site(_planted(tiny("gemma3"), modeling_siglip.SiglipAttention, forward))
    assert site.variant is None and "is not standard: its values miss" in site.evidence


# By type, the site that could only be declared before, and which of the plants below changes what its queries see.
HARD_TO_RUN = {
    "dia": ("model.decoder", "mask"),
    "molmo2": ("model.multi_modal_projector", "mask"),
    "idefics": ("", "mask"),
    "phi4_multimodal": ("model.embed_tokens_extend.audio_embed.encoder", "mask"),
    "udop": ("encoder", "mask"),
    "inkling2": ("model.vision_tower", "bounds"),
    "qwen3_asr": ("model.audio_tower", "bounds"),
    "kosmos-2.5": ("text_model", "is_causal"),
    "kyutai_speech_to_text": ("", "is_causal"),
    "step3p7": ("model.language_model", "is_causal"),
}


def _of_default_config(model_type):
    kinds = {name: kind for kind, name in reversed(model_types("all"))}
    with quiet():
        return _built(kinds[model_type], CONFIG_MAPPING[model_type]())


def _site_at(model, path):
    return next(each for each in AttentionInterface().find(model, "attention interface") if each.path == path)


def _otherwise(what, forward):
    """``forward``, which as for another interface than eager attention loses its mask or the bounds of sequences."""

    @functools.wraps(forward)
    def planted(self, *args, **kwargs):
        if self.config._attn_implementation != "eager" and what == "mask":
            args = [None if isinstance(each, torch.Tensor) and each.dim() == 4 else each for each in args]
            kwargs = {name: None if name.endswith("mask") else each for name, each in kwargs.items()}
        elif self.config._attn_implementation != "eager" and what == "bounds":
            kwargs["cu_seqlens"] = kwargs["cu_seqlens"][[0, -1]]
        return forward(self, *args, **kwargs)

    return planted


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=[pytest.mark.thorough] * (name != "dia")) for name in HARD_TO_RUN]
)
def test_what_no_words_alone_reach_is_proven_and_code_like_it_is_refused(model_type):
    path, plant = HARD_TO_RUN[model_type]
    model = _of_default_config(model_type)
    found = _site_at(model, path)
    assert found.variant == "standard" and found.examined and not found.declared, found.evidence
    modules = [model.get_submodule(each) for each in readers_by_owner(model)[path]]
    for module in modules:
        kind = type(module)
        if plant == "is_causal":
            module.is_causal = False
        else:
            module.__class__ = type("Planted", (kind,), {"forward": _otherwise(plant, kind.forward)})
    found = _site_at(model, path)
    assert found.variant is None or {"sdpa_mask", "flash_attention_mask"} <= found.refuses.keys(), found.evidence
    model = _of_default_config(model_type)
    for module in [model.get_submodule(each) for each in readers_by_owner(model)[path]]:
        forward = type(module).forward
        (name,) = {name for name, _ in global_functions(forward) if name.endswith("eager_attention_forward")}
        hotter = _scaled(dict(global_functions(forward))[name])
        module.__class__ = type("Planted", (type(module),), {"forward": with_globals(forward, {name: hotter})})
    found = _site_at(model, path)
    assert found.variant is None and "is not standard" in found.evidence


def _scaled(own):
    def hotter_attention(module, query, *args, **kwargs):
        return own(module, 1.1 * query, *args, **kwargs)

    return hotter_attention
