"""What modules that look like a known op are found to be, and the modules that the lookalikes vary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, MixtralConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from counting_kernels import counting_registry
from veomni_core import Site, find_sites

REGISTRY = counting_registry("one")
WIDTH = 64


def sites(op: str, *modules: nn.Module) -> list[Site]:
    return [site for site in find_sites(nn.Sequential(*modules), REGISTRY) if site.op_name == op]


def variants(op: str, *modules: nn.Module) -> list[str | None]:
    return [site.variant for site in sites(op, *modules)]


class PlainRMSNorm(LlamaRMSNorm):
    def __init__(self) -> None:
        super().__init__(WIDTH, 1e-6)


class PlainMLP(LlamaMLP):
    def __init__(self) -> None:
        super().__init__(LlamaConfig(hidden_size=WIDTH, intermediate_size=96))


class PlainExperts(MixtralExperts):
    def __init__(self) -> None:
        config = MixtralConfig(hidden_size=WIDTH, intermediate_size=40, num_local_experts=4)
        config._experts_implementation = "eager"
        super().__init__(config)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.2)


def normed(self: Any, x: Tensor) -> Tensor:
    wide = x.float()
    return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)).to(x.dtype)


def gated(self: Any, x: Tensor) -> Tensor:
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def routed(self: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    result = torch.zeros_like(x)
    for expert in range(4):
        token, position = torch.where(index == expert)
        gate, up = F.linear(x[token], self.gate_up_proj[expert]).chunk(2, -1)
        output = F.linear(F.silu(gate) * up, self.down_proj[expert]) * weights[token, position, None]
        result = result.index_add(0, token, output)
    return result


_BASES = {"rms_norm": PlainRMSNorm, "swiglu_mlp": PlainMLP, "moe_experts": PlainExperts}


def varied(op: str, forward: Callable[..., Any], **attributes: Any) -> nn.Module:
    """A module of ``op`` whose class has another forward, and that holds ``attributes``."""
    module = type(f"Varied{_BASES[op].__name__}", (_BASES[op],), {"forward": forward})()
    for name, value in attributes.items():
        setattr(module, name, value)
    return module
