"""Modules that look like a known op and compute something else: none may be bound as what it isn't."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama import modeling_llama
from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralExperts

from counting_kernels import counting_registry
from veomni_core import find_sites

REGISTRY = counting_registry("one")


def variants(module: nn.Module, op: str) -> list[str | None]:
    return [site.variant for site in find_sites(nn.Sequential(module), REGISTRY) if site.op_name == op]


class AnRMSNorm(nn.Module):
    """The Llama norm, to be varied."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(24))
        self.variance_epsilon = 1e-6
        self.steps, self.flag = 0, True

    def forward(self, x):
        wide = x.float()
        normalised = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * normalised.to(x.dtype)


class RoundsTwice(AnRMSNorm):
    def forward(self, x):
        return (self.weight.to(x.dtype) * super().forward(x)) / self.weight.to(x.dtype)


class RoundsTheWeight(AnRMSNorm):
    def forward(self, x):
        wide = x.float()
        normalised = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight.to(x.dtype).float() * normalised).to(x.dtype)


class EpsilonOutsideTheRoot(AnRMSNorm):
    def forward(self, x):
        wide = x.float()
        normalised = wide / (wide.pow(2).mean(-1, keepdim=True).sqrt() + self.variance_epsilon)
        return self.weight * normalised.to(x.dtype)


class AnotherEpsilon(AnRMSNorm):
    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


class Scaled(AnRMSNorm):
    def forward(self, x):
        return super().forward(x) * 1.01


class Clamped(AnRMSNorm):
    def forward(self, x):
        return super().forward(x).clamp(-3, 3)


class Centred(AnRMSNorm):
    def forward(self, x):
        return super().forward(x - x.mean(-1, keepdim=True))


class SumOfSquares(AnRMSNorm):
    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


class DependsOnABuffer(AnRMSNorm):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(24))

    def forward(self, x):
        return super().forward(x) * self.scale.to(x.dtype)


class StopsTheGradient(AnRMSNorm):
    def forward(self, x):
        return self.weight * (super().forward(x) / self.weight).detach().to(x.dtype)


class Detached(AnRMSNorm):
    def forward(self, x):
        return super().forward(x).detach()


class AnotherShape(AnRMSNorm):
    def forward(self, x):
        return super().forward(x)[..., :2]


class NegatedRMSNorm(AnRMSNorm):
    def forward(self, x):
        return -super().forward(x)


class NotAnRMSNorm(nn.LayerNorm):
    """A layer norm under the other name."""

    def __init__(self) -> None:
        super().__init__(24, bias=False)


NORMS = [
    RoundsTwice,
    RoundsTheWeight,
    EpsilonOutsideTheRoot,
    AnotherEpsilon,
    Scaled,
    Clamped,
    Centred,
    SumOfSquares,
    DependsOnABuffer,
    StopsTheGradient,
    Detached,
    AnotherShape,
    NegatedRMSNorm,
    NotAnRMSNorm,
]


def test_the_norm_that_the_others_vary_is_the_standard_one():
    assert variants(AnRMSNorm(), "rms_norm") == ["standard"]


@pytest.mark.parametrize("kind", NORMS)
def test_norms(kind):
    kind.__name__ = f"{kind.__name__}RMSNorm"  # the name is what draws attention to a module, and proves nothing
    assert variants(kind(), "rms_norm") == [None]


class AnMLP(modeling_llama.LlamaMLP):
    """Llama's MLP, to be varied."""

    def __init__(self) -> None:
        super().__init__(LlamaConfig(hidden_size=64, intermediate_size=96))
        self.limit = 10.0


class ClampsFarOut(AnMLP):
    def forward(self, x):
        gate, up = self.gate_proj(x).clamp(max=self.limit), self.up_proj(x).clamp(-self.limit, self.limit)
        return self.down_proj(F.silu(gate) * up)


class Multiplied(AnMLP):
    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)) * 1.001


class PlusOne(AnMLP):
    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * (self.up_proj(x) + 1))


class Residual(AnMLP):
    def forward(self, x):
        return x + super().forward(x)


class SlowerSilu(AnMLP):
    def forward(self, x):
        gate = self.gate_proj(x)
        return self.down_proj(gate * torch.sigmoid(1.02 * gate) * self.up_proj(x))


class DropsOut(AnMLP):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.1, training=self.training)


class DetachesTheGate(AnMLP):
    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)).detach() * self.up_proj(x))


class DetachesAll(AnMLP):
    def forward(self, x):
        return super().forward(x).detach()


@pytest.mark.parametrize(
    "kind", [ClampsFarOut, Multiplied, PlusOne, Residual, SlowerSilu, DropsOut, DetachesTheGate, DetachesAll]
)
def test_gated_mlps(kind):
    assert variants(AnMLP(), "swiglu_mlp") == ["standard"]
    assert variants(kind(), "swiglu_mlp") == [None]


class SwappedGate(AnMLP):
    """The gate goes by the name of the other projection: that is known by value, and bound the right way round."""

    def forward(self, x):
        return self.down_proj(F.silu(self.up_proj(x)) * self.gate_proj(x))


def test_a_swapped_gate_is_bound_as_it_computes():
    (site,) = [site for site in find_sites(nn.Sequential(SwappedGate()), REGISTRY) if site.op_name == "swiglu_mlp"]
    assert site.detail["layout"] == ["up_proj", "gate_proj", "down_proj"]


class Experts(MixtralExperts):
    """Mixtral's experts, to be varied."""

    def __init__(self) -> None:
        config = MixtralConfig(hidden_size=24, intermediate_size=40, num_local_experts=3)
        config._experts_implementation = "eager"
        super().__init__(config)

    gate_first, power, scale, limit = True, 1.0, 1.0, None

    def forward(self, hidden_states, top_k_index, top_k_weights):
        result = torch.zeros_like(hidden_states)
        for expert in range(self.gate_up_proj.shape[0]):
            token, position = torch.where(top_k_index == expert)
            gate, up = F.linear(hidden_states[token], self.gate_up_proj[expert]).chunk(2, dim=-1)
            gate, up = (gate, up) if self.gate_first else (up, gate)
            if self.limit:
                gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit) + 0.5
            output = F.linear(F.silu(gate) * up, self.down_proj[expert]) * self.scale
            result = result.index_add(0, token, output * top_k_weights[token, position, None] ** self.power)
        return result


@pytest.mark.parametrize(
    "settings",
    [{"gate_first": False}, {"power": 2.0}, {"scale": 1.001}, {"limit": 12.0}],
    ids=["swapped gate", "weights squared", "a scale", "a clamp with another offset"],
)
def test_experts(settings):
    assert variants(Experts(), "moe_experts") == ["standard"]
    assert variants(type("Varied", (Experts,), settings)(), "moe_experts") == [None]


class UnweightedRouter(Experts):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        return super().forward(hidden_states, top_k_index, top_k_weights.detach())


def test_experts_that_send_the_router_no_gradient():
    assert variants(UnweightedRouter(), "moe_experts") == [None]


def attention_with(rotary) -> nn.Module:
    """A Llama layer whose attention calls ``rotary`` instead of the family's function."""
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1)
    config._attn_implementation = "eager"
    namespace = {**vars(modeling_llama), "apply_rotary_pos_emb": rotary}
    plain = modeling_llama.LlamaAttention.forward
    forward = type(plain)(plain.__code__, namespace, plain.__name__, plain.__defaults__, plain.__closure__)
    forward.__kwdefaults__ = plain.__kwdefaults__
    kind = type("Attention", (modeling_llama.LlamaAttention,), {"forward": forward})
    return nn.ModuleList([kind(config, 0), modeling_llama.LlamaRotaryEmbedding(config)])


def rotated(q, k, cos, sin, turn):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + turn(q) * sin, k * cos + turn(k) * sin


def llama_rotary(q, k, cos, sin, unsqueeze_dim=1):
    return modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)


def of_first_half(q, k, cos, sin, unsqueeze_dim=1):
    """Llama's wherever both halves are the same, as Llama's embedding makes them."""
    first = (torch.cat((x.chunk(2, dim=-1)[0],) * 2, dim=-1) for x in (cos, sin))
    return llama_rotary(q, k, *first)


def in_low_precision_unturned(q, k, cos, sin, unsqueeze_dim=1):
    return llama_rotary(q, k, cos, sin) if q.dtype == torch.float32 else (q.clone(), k.clone())


def widening(q, k, cos, sin, unsqueeze_dim=1):
    return tuple(x.float() for x in llama_rotary(q, k, cos, sin))


def of_complex(q, k, cos, sin, unsqueeze_dim=1):
    turn = torch.polar(torch.ones_like(cos[..., ::2].float()), sin[..., ::2].float()).unsqueeze(1)
    both = (torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) * turn for x in (q, k))
    return tuple(torch.view_as_real(x).flatten(-2).to(q.dtype) for x in both)


# What each is found to be; None is refused. A regular one that isn't Llama's has its own name.
ROTARIES = {
    "sign flipped": (
        lambda q, k, cos, sin, unsqueeze_dim=1: rotated(q, k, cos, sin, lambda x: -modeling_llama.rotate_half(x)),
        "sign_flipped",
    ),
    # Llama's embedding hands over halves that are the same, not the neighbours that this one needs.
    "pairs of neighbours": (
        lambda q, k, cos, sin, unsqueeze_dim=1: rotated(
            q, k, cos, sin, lambda x: torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
        ),
        None,
    ),
    "queries alone": (lambda q, k, cos, sin, unsqueeze_dim=1: (llama_rotary(q, k, cos, sin)[0], k), None),
    "queries alone flipped": (
        lambda q, k, cos, sin, unsqueeze_dim=1: (llama_rotary(q, k, cos, sin)[0], llama_rotary(q, k, cos, -sin)[1]),
        None,
    ),
    "scaled": (lambda q, k, cos, sin, unsqueeze_dim=1: llama_rotary(q * 1.01, k, cos, sin), None),
    "cos and sin swapped": (lambda q, k, cos, sin, unsqueeze_dim=1: llama_rotary(q, k, sin, cos), None),
    "keys and queries swapped": (
        lambda q, k, cos, sin, unsqueeze_dim=1: llama_rotary(q, k, cos, sin)[::-1],
        None,
    ),
    "stops the gradient": (
        lambda q, k, cos, sin, unsqueeze_dim=1: (llama_rotary(q, k, cos, sin)[0].detach(), k),
        None,
    ),
    "of the first half": (of_first_half, "full"),
    "another function in bfloat16": (in_low_precision_unturned, None),
    "gives float32": (widening, None),
    "complex": (of_complex, None),
}


@pytest.mark.parametrize("name", ROTARIES)
def test_rotary_functions(name):
    assert variants(attention_with(modeling_llama.apply_rotary_pos_emb), "rotary_pos_emb") == ["full"]
    function, variant = ROTARIES[name]
    assert variants(attention_with(function), "rotary_pos_emb") == [variant]


@pytest.mark.parametrize("settings", [(False, True), (100, 3)], ids=["a flag", "a count"])
def test_modules_that_differ_in_a_setting_are_proven_apart(settings):
    class Warming(AnRMSNorm):
        def forward(self, x):
            cold = self.setting is True or (self.setting is not False and self.setting < 10)
            return super().forward(x) * (0.5 if cold else 1.0)

    one, other = Warming(), Warming()
    one.setting, other.setting = settings
    Warming.__name__ = "WarmingRMSNorm"
    found = [site.variant for site in find_sites(nn.Sequential(one, other), REGISTRY) if site.op_name == "rms_norm"]
    assert found == ["standard", None]
