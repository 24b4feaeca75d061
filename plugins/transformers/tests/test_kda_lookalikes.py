"""Functions named as ``kda``'s: what is bound, and what computes something else and stays eager."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kda_models import ALONE, FAMILIES, kda_sites, needs_kda, own
from veomni_core import bind

pytestmark = needs_kda


class Mixer(nn.Module):
    """A layer that calls a global, as transformers' do."""

    num_heads, head_dim = 2, 8

    def __init__(self):
        super().__init__()
        self.in_proj = nn.Linear(16, 2 * 8 * 4)
        self.b_proj = nn.Linear(16, 2)

    def forward(self, x):
        q, k, v, g = self.in_proj(x).unflatten(-1, (4, 2, 8)).unbind(2)
        beta = self.b_proj(x).sigmoid()
        return chunk_kda(q, k, v, g=-F.softplus(g), beta=beta, use_qk_l2norm_in_kernel=True)[0]


def chunk_kda(query, key, value, g, beta, **kwargs):
    arguments = _spoiled(query=query, key=key, value=value, g=g, beta=beta)
    return _own(**arguments, **kwargs)


_own = own() if FAMILIES else None
_spoiled = dict


def test_what_spoils_nothing_is_bound():
    torch.manual_seed(0)
    model, x = nn.Sequential(Mixer()), torch.randn(2, 9, 16)
    [site] = kda_sites(model)
    assert (site.variant, dict(site.detail)) == ("standard", {"function": "chunk_kda"})
    wanted = model(x)
    with bind(model, ALONE):
        torch.testing.assert_close(model(x), wanted, rtol=1e-4, atol=1e-5)


def _for_long_sequences(g, **others):
    return {"g": g.clamp(min=-1.0) if g.shape[1] > 1000 else g, **others}


LOOKALIKES = {
    "no decay": (lambda g, **others: {"g": torch.zeros_like(g), **others}, "no variant fits"),
    "one decay for all channels": (
        lambda g, **others: {"g": g.mean(-1, keepdim=True).expand_as(g), **others},
        "no variant fits",
    ),
    "a bounded decay": (lambda g, **others: {"g": g.clamp(min=-2.0), **others}, "no variant fits"),
    "values that count once more": (lambda value, **others: {"value": 1.01 * value, **others}, "no variant fits"),
    "no gradient of g": (lambda g, **others: {"g": g.detach(), **others}, "no variant fits"),
    "another rule for long sequences": (_for_long_sequences, "_for_long_sequences chooses by shape"),
}


@pytest.mark.parametrize("name", LOOKALIKES)
def test_a_function_of_this_name_that_computes_something_else_stays_eager(name, monkeypatch):
    spoil, words = LOOKALIKES[name]
    monkeypatch.setitem(globals(), "_spoiled", spoil)
    [site] = kda_sites(nn.Sequential(Mixer()))
    assert site.variant is None and words in site.evidence
