"""``selective_scan``: transformers' functions beside the reference, and functions that compute something else."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn
from transformers.models.falcon_mamba import modeling_falcon_mamba
from transformers.models.jamba import modeling_jamba
from transformers.models.mamba import modeling_mamba
from transformers.models.zamba import modeling_zamba

from veomni_core import bind, find_sites
from veomni_ops.selective_scan import standard
from veomni_transformers.forwards.scan_call import selective_scan_call

FILES = (modeling_falcon_mamba, modeling_jamba, modeling_mamba, modeling_zamba)
OWN = inspect.unwrap(modeling_mamba.mamba_selective_scan)
mamba_selective_scan = OWN


@pytest.mark.parametrize("modeling", FILES, ids=lambda module: module.__name__.rsplit(".", 1)[-1])
def test_the_reference_equals_transformers_own_code(modeling):
    torch.manual_seed(0)
    x, dt, z = torch.randn(3, 2, 6, 40)
    A, (B, C), (D, bias) = -torch.rand(6, 8), torch.randn(2, 2, 8, 40), torch.randn(2, 6)
    own = inspect.unwrap(modeling.mamba_selective_scan)
    wanted = own(x, dt, A, B, C, D=D, z=z, delta_bias=bias, delta_softplus=True, return_last_state=True)
    found = standard(x, dt, A, B, C, D, z, bias, dt_softplus=True, return_final_states=True)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


class Mixer(nn.Module):
    """What calls the scan; a test sets the global."""

    def __init__(self):
        super().__init__()
        self.in_proj = nn.Linear(16, 3 * 8 + 2 * 4)
        self.A_log = nn.Parameter(torch.zeros(8, 4))

    def forward(self, x):
        x, dt, z, B, C = self.in_proj(x).mT.split((8, 8, 8, 4, 4), dim=1)
        return mamba_selective_scan(x, dt, -self.A_log.exp(), B, C, z=z, delta_softplus=True)


def site_of(function, monkeypatch):
    monkeypatch.setitem(globals(), "mamba_selective_scan", function)
    [site] = [site for site in find_sites(nn.Sequential(Mixer())) if site.op_name == "selective_scan"]
    return site


def test_a_mixer_is_bound(monkeypatch):
    torch.manual_seed(0)
    assert site_of(OWN, monkeypatch).variant == "standard"
    model, x = nn.Sequential(Mixer()), torch.randn(2, 9, 16)
    wanted = model(x)
    with bind(model, {"preset": "eager", "selective_scan_implementation": "chunked_scan"}):
        torch.testing.assert_close(model(x), wanted, rtol=1e-5, atol=1e-6)


def ungated(*args, z=None, **options):
    return OWN(*args, **options)


def no_gradient_of_dt(hidden_states, dt, *args, **options):
    return OWN(hidden_states, dt.detach(), *args, **options)


def decays_half(hidden_states, dt, A, *args, **options):
    return OWN(hidden_states, dt, 0.5 * A, *args, **options)


def a_cap(hidden_states, dt, *args, **options):
    if hidden_states.shape[2] > 1000:
        dt = dt.clamp(max=1.0)
    return OWN(hidden_states, dt, *args, **options)


@pytest.mark.parametrize("function", [ungated, no_gradient_of_dt, decays_half, a_cap])
def test_a_function_of_this_name_that_computes_something_else_stays_eager(function, monkeypatch):
    site = site_of(function, monkeypatch)
    assert site.variant is None and site.evidence


def test_boundaries_come_from_either_argument_and_no_other():
    torch.manual_seed(0)
    call, (x, dt), A = selective_scan_call(standard), torch.randn(2, 1, 6, 9), -torch.rand(6, 8)
    B, C = torch.randn(2, 1, 8, 9)
    by_ends = call(x, dt, A, B, C, cu_seq_lens_q=torch.tensor([0, 4, 9]))
    assert torch.equal(by_ends, call(x, dt, A, B, C, seq_idx=(torch.arange(9) >= 4).int()[None]))
    assert torch.equal(
        by_ends[..., 4:], call(*(each[..., 4:] for each in (x, dt)), A, *(each[..., 4:] for each in (B, C)))
    )
    with pytest.raises(ValueError, match="pass boundaries as cu_seq_lens_q or seq_idx"):
        call(x, dt, A, B, C, cu_seqlens=torch.tensor([0, 4, 9]))
