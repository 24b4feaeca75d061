"""Models that transformers' distributed engine shards, with random weights that don't depend on the layout."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, distributed
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from benchmarks.sharded.ranks import DEVICE, total

_STD = 0.02
# Sizes for trying a script out on CPUs.
_TINY: Mapping[str, int] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 128,
}


def tiny(config: PretrainedConfig) -> PretrainedConfig:
    """``config`` with the sizes of a model that a CPU runs in no time."""
    for name, size in _TINY.items():
        if hasattr(config, name):
            setattr(config, name, size)
    return config


def build(config: PretrainedConfig, layout: Mapping[str, int]) -> Any:
    """The model in bf16, with attention by ``sdpa``; this rank gets its part.

    Args:
        config: of a causal language model.
        layout: the fields of transformers' ``DistributedConfig``.
    """
    from transformers.distributed import DistributedConfig

    with torch.device("meta"):
        model_class: Any = type(AutoModelForCausalLM.from_config(config))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="DTensor random operators")  # what they draw is replaced below
        model = model_class.from_pretrained(
            None,
            config=config,
            state_dict={},
            dtype=torch.bfloat16,
            attn_implementation="sdpa",
            distributed_config=DistributedConfig(**layout),
        )
    _draw(model)
    return model.train()


def batch_number(model: Any) -> int:
    """Which of the data-parallel ranks' batches this rank has."""
    number: int = model._mesh_manager.get_mesh("fsdp").get_local_rank()
    return number


def batches(model: Any) -> int:
    """How many ranks have a batch of their own."""
    count: int = model._mesh_manager.get_mesh("fsdp").size()
    return count


def gradient_norm(model: PreTrainedModel) -> float:
    """The norm of the gradient of all parameters together. What several ranks have a copy of counts once."""
    squares = torch.zeros((), dtype=torch.float64, device=DEVICE)
    for parameter in model.parameters():
        if parameter.grad is not None:
            norm = torch.linalg.vector_norm(_local(parameter.grad), dtype=torch.float32)
            squares += norm.double() ** 2 / _copies(parameter.grad)
    return float(total(squares) ** 0.5)


def _draw(model: PreTrainedModel) -> None:
    """Draw every parameter whole, as transformers initialises these models, and keep this rank's part."""
    generator = torch.Generator(DEVICE)
    for number, parameter in enumerate(model.parameters()):
        generator.manual_seed(number)
        if parameter.dim() == 1:  # a norm's weight
            whole = torch.ones(parameter.shape, dtype=parameter.dtype, device=DEVICE)
        else:
            whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=DEVICE).normal_(
                0, _STD, generator=generator
            )
        _keep_part(parameter, whole)


@torch.no_grad()
def _keep_part(parameter: Any, whole: Tensor) -> None:
    from torch.distributed.tensor import DTensor, distribute_tensor

    if isinstance(parameter, DTensor):
        part = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.to_local().copy_(part.to_local())
    else:
        parameter.copy_(whole)


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def _copies(tensor: Any) -> int:
    """On how many ranks each element is."""
    parts = 1
    if hasattr(tensor, "placements"):
        for dimension, placement in enumerate(tensor.placements):
            parts *= 1 if placement.is_replicate() else tensor.device_mesh.size(dimension)
    return distributed.get_world_size() // parts
