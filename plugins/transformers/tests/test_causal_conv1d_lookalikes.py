"""Functions and convolutions that look like ``causal_conv1d``: which are bound, and why the others are not."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.models.qwen3_next import modeling_qwen3_next

from veomni_core import find_sites


class Mixer(nn.Module):
    """Calls a ``causal_conv1d_fn`` as transformers' mixers do."""

    activation = "silu"

    def __init__(self):
        super().__init__()
        self.in_proj = nn.Linear(16, 6)
        self.conv1d = nn.Conv1d(6, 6, 4, groups=6, padding=3)

    def forward(self, hidden_states, cache=None):
        x = self.in_proj(hidden_states).transpose(1, 2)
        return causal_conv1d_fn(x, self.conv1d.weight.squeeze(1), self.conv1d.bias, activation=self.activation)


def causal_conv1d_fn(hidden_states, weight, bias=None, activation=None, **kwargs):
    """The right one, which each test replaces."""
    channels, length = hidden_states.shape[1:]
    out = F.conv1d(hidden_states.to(weight.dtype), weight[:, None], bias, padding=weight.shape[1] - 1, groups=channels)
    out = out[..., :length]
    return (out if activation is None else F.silu(out)).to(hidden_states.dtype)


RIGHT = causal_conv1d_fn


def centred(hidden_states, weight, bias=None, activation=None, **kwargs):
    out = F.conv1d(hidden_states, weight[:, None], bias, padding=weight.shape[1] - 1, groups=len(weight))
    out = out[..., weight.shape[1] // 2 :][..., : hidden_states.shape[2]]
    return out if activation is None else F.silu(out)


def dilated(hidden_states, weight, bias=None, activation=None, **kwargs):
    reach = 2 * (weight.shape[1] - 1)
    out = F.conv1d(hidden_states, weight[:, None], bias, padding=reach, dilation=2, groups=len(weight))
    out = out[..., : hidden_states.shape[2]]
    return out if activation is None else F.silu(out)


def mixing_channels(hidden_states, weight, bias=None, activation=None, **kwargs):
    every = weight[:, None].expand(-1, len(weight), -1)
    out = F.conv1d(hidden_states, every, bias, padding=weight.shape[1] - 1)[..., : hidden_states.shape[2]]
    return out if activation is None else F.silu(out)


def repeating_the_first(hidden_states, weight, bias=None, activation=None, **kwargs):
    x = F.pad(hidden_states, (weight.shape[1] - 1, 0), mode="replicate")
    out = F.conv1d(x, weight[:, None], bias, groups=len(weight))
    return out if activation is None else F.silu(out)


def with_the_residual(hidden_states, weight, bias=None, activation=None, **kwargs):
    return RIGHT(hidden_states, weight, bias, activation) + hidden_states


def activated_twice(hidden_states, weight, bias=None, activation=None, **kwargs):
    return F.silu(RIGHT(hidden_states, weight, bias, activation))


def without_its_bias(hidden_states, weight, bias=None, activation=None, **kwargs):
    return RIGHT(hidden_states, weight, None, activation)


def detached(hidden_states, weight, bias=None, activation=None, **kwargs):
    return RIGHT(hidden_states.detach(), weight, bias, activation)


def clamped(hidden_states, weight, bias=None, activation=None, **kwargs):
    return RIGHT(hidden_states, weight, bias, activation).clamp(max=1e4)


def another_for_long_rows(hidden_states, weight, bias=None, activation=None, **kwargs):
    if hidden_states.shape[2] > 1000:
        return 2 * RIGHT(hidden_states, weight, bias, activation)
    return RIGHT(hidden_states, weight, bias, activation)


SCALES = [1.0]


def of_a_list(hidden_states, weight, bias=None, activation=None, **kwargs):
    return RIGHT(hidden_states, weight, bias, activation) * SCALES[0]


def site_of(module):
    (site,) = [site for site in find_sites(nn.Sequential(module)) if site.op_name == "causal_conv1d"]
    return site


def test_a_mixer_of_ones_own_is_found():
    site = site_of(Mixer())
    assert site.variant == "standard" and site.path == "0" and site.dtype == "float32"
    assert site.sizes == {"channels": (6,), "width": (4,)}
    assert site.evidence.endswith("unbound, the model runs it")


class WithoutALinear(nn.Module):
    """Convolves what it is given, beside itself, as Inkling's short convolutions do."""

    def __init__(self):
        super().__init__()
        self.conv1d = nn.Conv1d(6, 6, 4, groups=6, padding=3, bias=False)

    def forward(self, hidden_states):
        x = hidden_states.float().transpose(1, 2)
        return causal_conv1d_fn(x, self.conv1d.weight.squeeze(1), self.conv1d.bias).transpose(1, 2) + hidden_states


def test_a_module_without_a_linear_is_given_what_its_convolution_takes():
    site = site_of(WithoutALinear())
    assert site.variant == "standard" and site.sizes == {"channels": (6,), "width": (4,)}


@pytest.mark.parametrize(
    "function, words",
    [
        (centred, "misses by"),
        (dilated, "misses by"),
        (mixing_channels, "misses by"),
        (repeating_the_first, "misses by"),
        (with_the_residual, "misses by"),
        (activated_twice, "misses by"),
        (without_its_bias, "misses by"),
        (detached, "misses by"),
        (clamped, "misses by"),
        (another_for_long_rows, "one branch never ran"),
        (of_a_list, "reads the global SCALES"),
    ],
)
def test_a_function_that_computes_something_else_is_not_bound(function, words, monkeypatch):
    monkeypatch.setitem(globals(), "causal_conv1d_fn", function)
    site = site_of(Mixer())
    assert site.variant is None and words in site.evidence


class WithGelu(Mixer):
    activation = "gelu"


class WithStates(Mixer):
    def forward(self, hidden_states):
        x = self.in_proj(hidden_states).transpose(1, 2)
        return causal_conv1d_fn(x, self.conv1d.weight.squeeze(1), initial_states=torch.zeros(2, 6, 3))


class OnlyInEvaluation(Mixer):
    def forward(self, hidden_states):
        return hidden_states if self.training else super().forward(hidden_states) + causal_conv1d_fn(hidden_states)


class ChannelsLast(Mixer):
    def forward(self, hidden_states):
        return causal_conv1d_fn(self.in_proj(hidden_states), self.conv1d.weight.squeeze(1))


@pytest.mark.parametrize(
    "mixer, words",
    [
        (WithGelu, "is given the activation 'gelu'"),
        (WithStates, "initial_states"),
        (OnlyInEvaluation, "does not call causal_conv1d_fn"),
        (ChannelsLast, "is given x [2, 11, 6], and [2, 6, 11] was expected"),
    ],
)
def test_a_call_that_no_kernel_takes_leaves_its_site_eager(mixer, words):
    site = site_of(mixer())
    assert site.variant is None and words in site.evidence


class CallsItsConvolution(Mixer):
    """As mixers of transformers 5.2 do without a package."""

    def forward(self, hidden_states):
        x = self.in_proj(hidden_states).transpose(1, 2)
        return F.silu(self.conv1d(x)[..., : x.shape[2]])


def test_a_convolution_out_of_reach_is_listed_with_the_reason():
    site = site_of(CallsItsConvolution())
    assert site.variant is None and not site.examined and site.sizes == {"channels": (6,), "width": (4,)}
    assert site.evidence == "it runs its convolution conv1d in another way than by calling a function causal_conv1d_fn"


class CallsItWithoutAPackage(CallsItsConvolution):
    def forward(self, hidden_states):
        return super().forward(hidden_states) if causal_conv1d_fn is None else Mixer.forward(self, hidden_states)


def test_a_function_that_is_none_is_not_called(monkeypatch):
    monkeypatch.setitem(globals(), "causal_conv1d_fn", None)
    site = site_of(CallsItWithoutAPackage())
    assert site.variant is None and "in another way" in site.evidence


def test_a_centred_convolution_is_no_site():
    class Centred(CallsItsConvolution):
        def __init__(self):
            super().__init__()
            self.conv1d = nn.Conv1d(6, 6, 3, groups=6, padding=1)

    assert "causal_conv1d" not in {site.op_name for site in find_sites(nn.Sequential(Centred()))}


@pytest.mark.parametrize(
    "convolution",
    [nn.Conv1d(6, 6, 4, groups=2, padding=3), nn.Conv1d(6, 12, 4, groups=6, padding=3)],
    ids=["groups of several channels", "more channels out than in"],
)
def test_a_convolution_that_is_not_depthwise_is_no_site(convolution):
    mixer = CallsItsConvolution()
    mixer.conv1d = convolution
    assert "causal_conv1d" not in {site.op_name for site in find_sites(nn.Sequential(mixer))}


def test_a_dilated_convolution_is_no_site():
    mixer = CallsItsConvolution()
    mixer.conv1d = nn.Conv1d(6, 6, 4, groups=6, padding=3, dilation=2)
    assert "causal_conv1d" not in {site.op_name for site in find_sites(nn.Sequential(mixer))}


def test_a_width_beyond_the_packages_needs_a_feature():
    mixer = Mixer()
    mixer.conv1d = nn.Conv1d(6, 6, 7, groups=6, padding=6)
    site = site_of(mixer)
    assert site.variant == "standard" and site.needs == ("any_width",) and site.sizes["width"] == (7,)


def test_a_package_that_transformers_chose_is_named(monkeypatch):
    function = modeling_qwen3_next.causal_conv1d_fn
    names = function.__code__.co_freevars
    cells = dict(zip(names, function.__closure__, strict=True))

    def their_kernel(x, weight, bias=None, seq_idx=None, activation=None):
        raise RuntimeError("it runs on GPUs")

    their_kernel.__module__ = "causal_conv1d.causal_conv1d_interface"
    for name, value in (("implementation", their_kernel), ("is_new_implementation", True)):
        monkeypatch.setattr(cells[name], "cell_contents", value)
    monkeypatch.setitem(globals(), "causal_conv1d_fn", function)
    site = site_of(Mixer())
    assert site.variant == "standard"
    assert site.own == "causal_conv1d.causal_conv1d_interface.their_kernel"
    assert site.evidence.endswith(f"unbound, the model runs {site.own}")


def causal_conv1d_update(hidden_states, conv_state, weight, bias=None, activation=None):
    """The right step of a single token, which each test replaces."""
    seen = torch.cat([conv_state, hidden_states], dim=-1)
    conv_state.copy_(seen[..., 1:])
    out = (seen[..., 1:] * weight).sum(-1, keepdim=True)
    out = out if bias is None else out + bias[:, None]
    return (out if activation is None else F.silu(out)).to(hidden_states.dtype)


STEP = causal_conv1d_update


def of_the_state_alone(hidden_states, conv_state, weight, bias=None, activation=None):
    return STEP(conv_state[..., -1:], conv_state, weight, bias, activation)


def that_leaves_its_state(hidden_states, conv_state, weight, bias=None, activation=None):
    return STEP(hidden_states, conv_state.clone(), weight, bias, activation)


def that_is_another_for_many_channels(hidden_states, conv_state, weight, bias=None, activation=None):
    factor = 2 if len(weight) > 1000 else 1
    return factor * STEP(hidden_states, conv_state, weight, bias, activation)


class Decoding(Mixer):
    def forward(self, hidden_states, cache=None):
        x, weight = self.in_proj(hidden_states).transpose(1, 2), self.conv1d.weight.squeeze(1)
        if cache is None:
            return causal_conv1d_fn(x, weight, self.conv1d.bias, activation=self.activation)
        return causal_conv1d_update(x, cache, weight, self.conv1d.bias, self.activation)


@pytest.mark.parametrize(
    "function, is_proven",
    [
        (STEP, True),
        (of_the_state_alone, False),
        (that_leaves_its_state, False),
        (that_is_another_for_many_channels, False),
    ],
)
def test_a_step_of_single_tokens_is_proven_by_its_values_and_its_state(function, is_proven, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "causal_conv1d_update", function)
    site = site_of(Decoding())
    assert site.variant == "standard" and ("causal_conv1d_update" in site.detail) == is_proven
