"""``mamba2_scan``: transformers' functions beside the reference, lookalikes, and what the contract catches."""

from __future__ import annotations

import functools
import inspect

import pytest
import torch
from planted_faults import assert_caught
from torch import nn
from transformers.models.bamba import modeling_bamba
from transformers.models.falcon_h1 import modeling_falcon_h1
from transformers.models.granitemoehybrid import modeling_granitemoehybrid
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.nemotron_h import modeling_nemotron_h
from transformers.models.zamba2 import modeling_zamba2

from veomni_core import bind, find_sites
from veomni_ops.mamba2_scan import standard
from veomni_transformers.mamba2_scans.proof import gives_nothing

FILES = (
    *(modeling_bamba, modeling_falcon_h1, modeling_granitemoehybrid),
    *(modeling_mamba2, modeling_nemotron_h, modeling_zamba2),
)


@pytest.mark.parametrize("modeling", FILES, ids=lambda module: module.__name__.rsplit(".", 1)[-1])
def test_the_reference_equals_transformers_own_code(modeling):
    torch.manual_seed(0)
    x, dt, A = torch.randn(2, 70, 4, 6), torch.randn(2, 70, 4), -torch.rand(4)
    B, C = torch.randn(2, 70, 2, 8), torch.randn(2, 70, 2, 8)
    options = {"D": torch.randn(4), "dt_bias": torch.randn(4), "dt_softplus": True, "return_final_states": True}
    options |= {"initial_states": torch.randn(2, 4, 6, 8), "dt_limit": (0.1, 0.7)}
    own = inspect.unwrap(modeling.mamba2_chunk_scan)
    torch.testing.assert_close(
        standard(x, dt, A, B, C, **options), own(x, dt, A, B, C, chunk_size=16, **options), rtol=1e-4, atol=1e-5
    )


OWN = inspect.unwrap(modeling_mamba2.mamba2_chunk_scan)
mamba2_chunk_scan = OWN


class Mixer(nn.Module):
    """What calls the scan; a test sets the global."""

    def __init__(self):
        super().__init__()
        self.in_proj = nn.Linear(16, 2 * 8 + 2 * 4 + 2)
        self.A_log = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        values, writes, reads, dt = self.in_proj(x).split((16, 4, 4, 2), dim=-1)
        values, A = values.unflatten(-1, (2, 8)), -self.A_log.exp()
        groups = (each.unsqueeze(2) for each in (writes, reads))
        return mamba2_chunk_scan(values, dt, A, *groups, chunk_size=4, dt_softplus=True)


def site_of(function, monkeypatch):
    monkeypatch.setitem(globals(), "mamba2_chunk_scan", function)
    [site] = [site for site in find_sites(nn.Sequential(Mixer())) if site.op_name == "mamba2_scan"]
    return site


def test_a_mixer_without_a_fused_step_is_bound(monkeypatch):
    torch.manual_seed(0)
    assert site_of(OWN, monkeypatch).variant == "standard"
    model, x = nn.Sequential(Mixer()), torch.randn(2, 9, 16)
    wanted = model(x)
    with bind(model, {"preset": "eager", "mamba2_scan_implementation": "chunked_scan"}):
        torch.testing.assert_close(model(x), wanted, rtol=1e-5, atol=1e-6)


def of_own(spoil):
    """Transformers' function with its arguments changed by ``spoil``."""
    own = OWN

    def spoiled(hidden_states, dt, A, B, C, chunk_size, **options):
        given = spoil(hidden_states=hidden_states, dt=dt, A=A, B=B, C=C)
        return own(**given, chunk_size=chunk_size, **options)

    return spoiled


def _a_cap(hidden_states, dt, A, B, C):
    if hidden_states.shape[1] > 1000:
        dt = dt.clamp(max=1.0)
    return {"hidden_states": hidden_states, "dt": dt, "A": A, "B": B, "C": C}


LOOKALIKES = {
    "no decay": (lambda A, **others: {"A": torch.zeros_like(A), **others}, "no variant fits"),
    "reads that count once more": (lambda C, **others: {"C": 1.01 * C, **others}, "no variant fits"),
    "no gradient of the time steps": (lambda dt, **others: {"dt": dt.detach(), **others}, "no variant fits"),
    "another rule for long sequences": (_a_cap, "_a_cap chooses by shape"),
}


@pytest.mark.parametrize("name", LOOKALIKES)
def test_a_function_of_this_name_that_computes_something_else_stays_eager(name, monkeypatch):
    spoil, words = LOOKALIKES[name]
    site = site_of(of_own(spoil), monkeypatch)
    assert site.variant is None and words in site.evidence


def test_a_decorated_function_is_compared_as_it_runs(monkeypatch):
    """What is beneath the decorator gives the reference's values, and the model runs something else."""

    @functools.wraps(OWN)
    def doubled(*args, **kwargs):
        found = OWN(*args, **kwargs)
        return (2 * found[0], found[1]) if isinstance(found, tuple) else 2 * found

    site = site_of(doubled, monkeypatch)
    assert site.variant is None and "no variant fits" in site.evidence


def test_a_fused_step_is_left_out_only_if_what_runs_gives_nothing():
    fused = modeling_mamba2.mamba2_split_conv1d_scan_combined

    @functools.wraps(fused)
    def decorated(*args, **kwargs):
        return 0

    assert gives_nothing(fused) == ""
    assert gives_nothing(decorated).endswith("which computes something by itself")


def test_what_spoils_nothing_is_proven(monkeypatch):
    assert site_of(of_own(lambda **given: given), monkeypatch).variant == "standard"


class WrongGradient(torch.autograd.Function):
    """Multiplies one input's gradient."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, upstream):
        return upstream * ctx.factor, None


def boundaries_are_ignored(*args, seq_idx=None, **options):
    return standard(*args, **options)


def state_is_carried_over(x, *others, seq_idx=None, initial_states=None, **options):
    """A sequence's outputs are its own, but the state before it enters with a thousandth."""
    output, final = standard(x, *others, seq_idx=seq_idx, initial_states=initial_states, **options)
    if seq_idx is None:
        return output, final
    mixed, _ = standard(x, *others, initial_states=initial_states, **options)
    return output + 1e-3 * (mixed - output), final


def initial_state_enters_every_sequence(*args, seq_idx=None, initial_states=None, **options):
    """The output of a packed row gets what each token would have read of the row's initial state."""
    output, final = standard(*args, seq_idx=seq_idx, initial_states=initial_states, **options)
    if seq_idx is None or initial_states is None:
        return output, final
    with_state, _ = standard(*args, initial_states=initial_states, **options)
    return output + with_state - standard(*args, **options)[0], final


def decay_is_ignored(x, dt, A, *others, **options):
    return standard(x, dt, A * 0.0, *others, **options)


def the_limit_is_ignored(*args, dt_limit=None, **options):
    return standard(*args, **options)


def groups_alternate(x, dt, A, B, C, *others, **options):
    """Neighbouring heads read different groups."""
    order = torch.arange(x.shape[2]).view(-1, B.shape[2]).T.flatten()
    if B.shape[2] == 1:
        return standard(x, dt, A, B, C, *others, **options)
    whole = [each.repeat(1, 1, len(order) // B.shape[2], 1) for each in (B, C)]
    return standard(x, dt, A, *whole, *others, **options)


def gradient_of_dt_is_off(x, dt, *others, **options):
    return standard(x, WrongGradient.apply(dt, 1.03), *others, **options)


def gradient_of_A_is_off(x, dt, A, *others, **options):
    return standard(x, dt, WrongGradient.apply(A, 1.03), *others, **options)


def no_gradient_through_the_final_state(*args, **options):
    output, final = standard(*args, **options)
    return output, None if final is None else WrongGradient.apply(final, 0.0)


FAULTS = {
    boundaries_are_ignored: "packed",
    state_is_carried_over: "packed",
    initial_state_enters_every_sequence: "packed",
    decay_is_ignored: "odd sizes",
    the_limit_is_ignored: "time steps at their limits",
    groups_alternate: "heads in groups",
    gradient_of_dt_is_off: "gradient",
    gradient_of_A_is_off: "gradient",
    no_gradient_through_the_final_state: "gradient",
}


@pytest.mark.parametrize("kernel", FAULTS, ids=lambda kernel: kernel.__name__)
def test_the_contract_catches(kernel):
    assert_caught(kernel, FAULTS[kernel], op="mamba2_scan")


X, DT, A, B = torch.zeros(1, 7, 4, 8), torch.zeros(1, 7, 4), torch.zeros(4), torch.zeros(1, 7, 2, 6)
MISTAKES = {
    "x has no heads": ({"x": X[0]}, "x is [7, 4, 8]; give [B, S, H, P]"),
    "B has another length": ({"B": B[:, 1:]}, "give both as [1, 7, G, N]"),
    "heads are no multiple": ({"x": X[:, :, :3]}, "x has 3 heads; give a multiple of the 2 groups"),
    "dt is one per token": ({"dt": DT[:, :, :1]}, "dt is [1, 7, 1]; give [1, 7, 4]"),
    "D is one per number": ({"D": torch.zeros(4, 8)}, "D is [4, 8]; give [4]"),
    "a state of another batch": ({"initial_states": torch.zeros(2, 4, 8, 6)}, "give [1, 4, 8, 6]"),
    "numbers of too few tokens": ({"seq_idx": torch.zeros(1, 6, dtype=torch.int32)}, "seq_idx is [1, 6]; give [1, 7]"),
    "numbers in float": ({"seq_idx": torch.zeros(1, 7)}, "give integers"),
    "limits that are swapped": ({"dt_limit": (1.0, 0.1)}, "give the smallest and the largest time step"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_call_that_does_not_fit_is_refused(name):
    wrong, words = MISTAKES[name]
    with pytest.raises(ValueError) as error:
        standard(**{"x": X, "dt": DT, "A": A, "B": B, "C": B, **wrong})
    assert words in str(error.value)
