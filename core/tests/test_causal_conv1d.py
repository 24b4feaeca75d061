"""causal_conv1d: its contract against transformers' function, the faults that it catches, and what isn't bound."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.models.qwen3_next import modeling_qwen3_next

from planted_faults import assert_caught, failures_of
from veomni_core import find_sites
from veomni_core.ops.causal_conv1d import numbered, standard
from veomni_core.sites.forwards.packed_convolution import for_packed_calls, sequence_numbers


@pytest.mark.parametrize("activation", [None, "silu", "swish"])
@pytest.mark.parametrize("bias", [None, torch.randn(6)], ids=["no bias", "bias"])
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("length", [1, 2, 11])
def test_the_reference_is_transformers_function(width, length, bias, activation):
    x, weight = torch.randn(2, 6, length, requires_grad=True), torch.randn(6, width, requires_grad=True)
    found = standard(x, weight, bias, activation)
    wanted = modeling_qwen3_next.causal_conv1d_fn(x, weight, bias, activation=activation)
    torch.testing.assert_close(found, wanted)
    upstream = torch.randn_like(wanted)
    for mine, theirs in zip(*(torch.autograd.grad(y, (x, weight), upstream) for y in (found, wanted)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lengths", [[1, 6], [6, 1], [1, 1, 5], [3, 1, 3], [1] * 7, [7]])
def test_the_reference_of_a_packed_row_is_that_of_each_sequence_alone(lengths):
    x, weight = torch.randn(1, 4, 7), torch.randn(4, 4)
    alone = [standard(part, weight) for part in x.split(lengths, dim=2)]
    torch.testing.assert_close(
        standard(x, weight, seq_idx=numbered(lengths, x.device)), torch.cat(alone, dim=2), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize(
    "change, words",
    [
        ({"activation": "gelu"}, "'gelu'"),
        ({"bias": torch.zeros(5)}, "one number for each of 4 channels"),
        ({"seq_idx": torch.zeros(2, 6, dtype=torch.int32)}, "one for each position of x"),
        ({"seq_idx": torch.zeros(2, 7)}, "give integers"),
        ({"weight": torch.zeros(5, 3)}, "give x"),
        ({"weight": torch.zeros(4, 1, 3)}, "give x"),
    ],
)
def test_a_call_that_no_kernel_computes_is_refused(change, words):
    with pytest.raises(ValueError, match=words):
        standard(**{"x": torch.zeros(2, 4, 7), "weight": torch.zeros(4, 3), **change})


def test_sequences_are_numbered_from_their_boundaries():
    x = torch.zeros(1, 3, 6)
    for boundaries, wanted in (([0, 6], [0] * 6), ([0, 1, 6], [0, 1, 1, 1, 1, 1]), ([0, 2, 2, 6], [0, 0, 2, 2, 2, 2])):
        assert sequence_numbers(torch.tensor(boundaries), x).tolist() == [wanted]
    with pytest.raises(ValueError, match="the batch has 2"):
        sequence_numbers(torch.tensor([0, 6]), x.expand(2, -1, -1))


def test_seq_idx_is_taken_before_the_boundaries():
    seen = []
    call = for_packed_calls(lambda *args, **kwargs: seen.append(kwargs["seq_idx"]))
    x, weight, numbers = torch.zeros(1, 3, 6), torch.zeros(3, 2), torch.arange(6)[None]
    call(x, weight, None, activation=None, seq_idx=numbers, cu_seq_lens_q=torch.tensor([0, 6]), max_length_q=6)
    call(x, weight)
    assert seen[0] is numbers and seen[1] is None


# Planted faults.


def leaks_over_a_boundary(x, weight, bias=None, activation=None, seq_idx=None):
    return standard(x, weight, bias, activation)


def leaks_the_first_of_two_neighbours(x, weight, bias=None, activation=None, seq_idx=None):
    """As one that compares with the number of the next position, and not with that of each earlier one."""
    if seq_idx is not None:
        seq_idx = torch.cat([seq_idx[:, 1:], seq_idx[:, -1:]], dim=1)
    return standard(x, weight, bias, activation, seq_idx)


def ignores_the_bias(x, weight, bias=None, activation=None, seq_idx=None):
    return standard(x, weight, None if bias is None else 0 * bias, activation, seq_idx)


def ignores_the_activation(x, weight, bias=None, activation=None, seq_idx=None):
    return standard(x, weight, bias, None, seq_idx)


def looks_ahead(x, weight, bias=None, activation=None, seq_idx=None):
    return standard(x.flip(2), weight, bias, activation, None if seq_idx is None else seq_idx.flip(1)).flip(2)


class _LosesOfTheGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        return weight.clone()

    @staticmethod
    def backward(ctx, upstream):
        share = torch.ones_like(upstream)
        share[:, 0] = 0.99
        return upstream * share


def has_a_gradient_that_is_off(x, weight, bias=None, activation=None, seq_idx=None):
    return standard(x, _LosesOfTheGradient.apply(weight), bias, activation, seq_idx)


class _LeaksInBackward(torch.autograd.Function):
    """Right in forward; its gradient of ``x`` is that of a row that isn't packed."""

    @staticmethod
    def forward(ctx, x, weight, bias, activation, seq_idx):
        ctx.save_for_backward(x, weight, bias, seq_idx)
        ctx.activation = activation
        return standard(x, weight, bias, activation, seq_idx)

    @staticmethod
    def backward(ctx, upstream):
        x, weight, bias, seq_idx = ctx.saved_tensors
        given = [each.detach().requires_grad_() for each in (x, weight, bias) if each is not None]
        with torch.enable_grad():
            packed, whole = (standard(*(*given, None)[:3], ctx.activation, index) for index in (seq_idx, None))
        dx, *others = torch.autograd.grad(packed, given, upstream, retain_graph=True)
        if seq_idx is not None:
            (dx,) = torch.autograd.grad(whole, given[:1], upstream)
        return dx, *others, *([None] * (4 - len(others)))


def leaks_in_backward(x, weight, bias=None, activation=None, seq_idx=None):
    return _LeaksInBackward.apply(x, weight, bias, activation, seq_idx)


FAULTS = [
    (leaks_over_a_boundary, "'packed': the result is off"),
    (leaks_the_first_of_two_neighbours, "'packed': the result is off"),
    (ignores_the_bias, "'a bias, no activation': the result is off"),
    (ignores_the_activation, "'odd length': the result is off"),
    (looks_ahead, "'odd length': the result is off"),
    (has_a_gradient_that_is_off, "'odd length': the gradient of weight is off"),
    (leaks_in_backward, "'packed': the gradient of x is off"),
]


@pytest.mark.parametrize(("kernel", "words"), FAULTS, ids=[kernel.__name__ for kernel, _ in FAULTS])
def test_the_contract_catches(kernel, words):
    assert_caught(kernel, words, op="causal_conv1d", features=("any_width",))


def takes_widths_of_the_package(x, weight, bias=None, activation=None, seq_idx=None):
    if not 2 <= weight.shape[1] <= 4:
        raise ValueError(f"the width is {weight.shape[1]}, not 2 to 4")
    return standard(x, weight, bias, activation, seq_idx)


def test_a_kernel_of_few_widths_passes_without_the_feature():
    assert failures_of(takes_widths_of_the_package, op="causal_conv1d") == ()
    assert any(
        "'seven positions'" in each
        for each in failures_of(takes_widths_of_the_package, op="causal_conv1d", features=("any_width",))
    )


# Lookalikes: functions of that name that compute something else, and callers that no kernel can serve.


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
