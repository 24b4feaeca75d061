"""The package `kernels` makes layers of functions that modeling files decorate; their sites are those functions'."""

from __future__ import annotations

import pytest
from torch import nn
from transformers.models.llama import modeling_llama

from models import build
from veomni_core.sites.find import find_sites


def layer_of(func):
    """As `kernels` 0.16 makes it, for transformers 5.17."""

    class Func(nn.Module):
        def forward(self, *args, **kwargs):
            return func(*args, **kwargs)

    return Func()


@pytest.fixture
def layer(monkeypatch):
    layer = layer_of(modeling_llama.apply_rotary_pos_emb)
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", layer)
    return layer


def rotary():
    sites = find_sites(build("llama", num_hidden_layers=1))
    return [(site.variant, site.evidence) for site in sites if site.op_name == "rotary_pos_emb"]


def test_a_layer_of_a_rotary_function_is_proven_as_the_function(layer):
    ((variant, evidence),) = rotary()
    assert variant == "full" and "apply_rotary_pos_emb gave the reference's values and gradients" in evidence


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.register_forward_hook(lambda *_: None),
        lambda layer: setattr(layer, "forward", lambda *args: args[:2]),
    ],
    ids=["a hook", "a kernel of the Hub"],
)
def test_a_layer_that_runs_more_or_something_else_is_refused(layer, change):
    change(layer)
    ((variant, evidence),) = rotary()
    assert variant is None and "reads the global apply_rotary_pos_emb, a Func, whose later changes" in evidence
