"""The stand-in for a decoder: found beside the output projection, however deep in the model both lie."""

from __future__ import annotations

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from counting_kernels import calls, counting_registry
from models import step, tokens
from veomni_core import bind
from veomni_transformers.losses.head_twin import head_twin
from veomni_transformers.proving import probe

REGISTRY = counting_registry("one")
LOSS_ALONE = {"preset": "eager", "cross_entropy_loss_implementation": "one"}
TINY_TEXT = {"vocab_size": 64, "embed_dim": 32, "layers": 2, "ffn_dim": 48, "attention_heads": 2, "dropout": 0.0}
TINY_VISION = {"hidden_size": 32, "patch_embed_hidden_size": 48, "d_ff": 48, "d_kv": 16, "num_hidden_layers": 1}


def test_of_a_model_within_the_model_no_decoder_is_copied():
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(CONFIG_MAPPING["kosmos-2.5"]())
    head = model.get_output_embeddings()
    with probe.seeded():
        twin, _ = head_twin(model, head, probe.random(2, 5, head.in_features))
    assert sum(p.numel() for p in model.parameters()) > 1e9
    assert sum(p.numel() for p in twin.parameters()) < 2e7  # what turns images into text


def test_its_loss_is_bound():
    config = CONFIG_MAPPING["kosmos-2.5"](text_config=TINY_TEXT, vision_config=TINY_VISION, latent_query_num=4)
    config.text_config.attention_dropout = config.text_config.activation_dropout = 0.0
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config).train()
    wanted = step(model, tokens())
    calls.clear()
    with bind(model, LOSS_ALONE, registry=REGISTRY):
        found = step(model, tokens())
    assert calls[("cross_entropy_loss", "causal", "one")] == 1
    torch.testing.assert_close(found[0], wanted[0])
    for name, gradient in wanted[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-3, atol=1e-6)


def test_a_model_that_is_all_projection_has_no_decoder():
    alone = torch.nn.Sequential(torch.nn.Linear(8, 12))
    with probe.seeded(), pytest.raises(LookupError, match="no child besides its output projection"):
        head_twin(alone, alone[0], torch.zeros(2, 5, 8))
