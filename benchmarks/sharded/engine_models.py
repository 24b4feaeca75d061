"""Models that transformers' distributed engine or torch shards, with random weights that don't depend on the layout."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.fsdp import fully_shard
from transformers import PretrainedConfig, PreTrainedModel

from benchmarks.sharded.ranks import DEVICE, total
from benchmarks.whole_models.contenders import auto_class

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
    # Of models that take images.
    "depth": 2,
    "num_heads": 4,
    "out_hidden_size": 64,
    "vision_start_token_id": 124,
    "image_token_id": 125,
    "video_token_id": 126,
}


def tiny(config: PretrainedConfig) -> PretrainedConfig:
    """``config`` with the sizes of a model that a CPU runs in no time."""
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        for name, size in _TINY.items():
            if name in part.to_dict():
                setattr(part, name, size)
    if hasattr(config, "vision_config"):
        config.vision_config.deepstack_visual_indexes = [0, 1]
        config.text_config.rope_parameters["mrope_section"] = [4, 2, 2]
    return config


def build(config: PretrainedConfig, layout: Mapping[str, int]) -> Any:
    """The model in bf16, with attention by ``sdpa``; this rank gets its part.

    Args:
        config: of a causal language model, or of one that takes images.
        layout: the fields of transformers' ``DistributedConfig``; if empty, torch's ``fully_shard`` divides the model.
    """
    if not layout:
        return _by_torch(config)
    from transformers.distributed import DistributedConfig

    with torch.device("meta"):
        model_class: Any = type(auto_class(config).from_config(config))
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


def _by_torch(config: PretrainedConfig) -> PreTrainedModel:
    """Each layer of decoder and towers is a unit, as where accelerate goes by ``_no_split_modules``."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model: PreTrainedModel = auto_class(config).from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    for module in [*model.modules()]:
        if type(module).__name__ in (model._no_split_modules or ()):
            fully_shard(module)
    fully_shard(model)
    return model.train()


def batch_number(model: Any) -> int:
    """Which of the data-parallel ranks' batches this rank has."""
    mesh = getattr(model, "_mesh_manager", None)
    number: int = mesh.get_mesh("fsdp").get_local_rank() if mesh else distributed.get_rank()
    return number


def batches(model: Any) -> int:
    """How many ranks have a batch of their own."""
    mesh = getattr(model, "_mesh_manager", None)
    count: int = mesh.get_mesh("fsdp").size() if mesh else distributed.get_world_size()
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
