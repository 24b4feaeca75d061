"""Modules that look like a gated MLP or experts and compute something else: none may be bound as what it isn't."""

from __future__ import annotations

import pytest
import torch
from lookalikes import sites, variants
from torch.nn import functional as F
from transformers import LlamaConfig, T5Config, T5ForConditionalGeneration
from transformers.models.llama import modeling_llama
from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralExperts

from veomni_core import find_sites


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
    assert variants("swiglu_mlp", AnMLP()) == ["standard"]
    assert variants("swiglu_mlp", kind()) == [None]


class SwappedGate(AnMLP):
    """The gate goes by the name of the other projection: that is known by value, and bound the right way round."""

    def forward(self, x):
        return self.down_proj(F.silu(self.up_proj(x)) * self.gate_proj(x))


def test_a_swapped_gate_is_bound_as_it_computes():
    (site,) = sites("swiglu_mlp", SwappedGate())
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
    assert variants("moe_experts", Experts()) == ["standard"]
    assert variants("moe_experts", type("Varied", (Experts,), settings)()) == [None]


class UnweightedRouter(Experts):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        return super().forward(hidden_states, top_k_index, top_k_weights.detach())


def test_experts_that_send_the_router_no_gradient():
    assert variants("moe_experts", UnweightedRouter()) == [None]


def test_an_mlp_that_casts_between_its_linears_is_refused_for_their_dtypes(tmp_path):
    """transformers keeps T5's ``wo`` in float32 where the model is loaded in float16, and T5's MLP casts for it."""
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "vocab_size": 64}
    config = T5Config(**sizes, feed_forward_proj="gated-gelu", dropout_rate=0.0)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    reasons = {
        torch.float16: "its linears have different dtypes (wi_0 is float16, wi_1 is float16, wo is float32)",
        torch.bfloat16: "chooses by wo, weight, Tensor",  # whether to cast
    }
    for dtype, reason in reasons.items():
        model = T5ForConditionalGeneration.from_pretrained(tmp_path, dtype=dtype)
        found = [site for site in find_sites(model) if site.op_name == "swiglu_mlp"]
        assert [site.variant for site in found] == [None] * 2
        assert reason in found[0].evidence
