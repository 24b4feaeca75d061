"""Where a model's weights are, as far as it decides for which device the model is planned."""

from __future__ import annotations

from typing import Any

from torch import nn


def is_on_the_cpu(model: nn.Module) -> bool:
    """Whether all weights are on the CPU, and no one has said that they will be computed on elsewhere.

    False for a model on the meta device, or partly on it: its weights are yet to be loaded or moved. Parameters that
    FSDP2 offloads to the CPU are computed on the device of their mesh.

    Example:
        >>> import torch
        >>> is_on_the_cpu(nn.Linear(2, 2)), is_on_the_cpu(nn.Linear(2, 2, device="meta"))
        (True, False)
    """
    kinds = {_device_type(parameter) for parameter in model.parameters()}
    return kinds == {"cpu"}


def _device_type(parameter: Any) -> str:
    mesh = getattr(parameter, "device_mesh", None)
    return str(parameter.device.type if mesh is None else mesh.device_type)
