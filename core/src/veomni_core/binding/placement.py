"""Compares the device that a bound model is on with the devices that its kernels can run on.

``bind(model, device="cuda")`` plans a model for the GPU while it is on the CPU, since trainers move it there. If nobody
moves it, its first forward fails with whatever error the kernel's library raises. The receipt says so beforehand. A
model that was planned for the CPU runs anywhere; the receipt says that it moved.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from veomni_core.descriptions.hardware import ANY_DEVICE, torch_device_type
from veomni_core.errors import ConfigError
from veomni_core.planning.plan import Plan


def device_type_of(device: Any) -> str | None:
    """The type of a ``torch.device`` or of a device's name; ``None`` for ``None``.

    Raises:
        ConfigError: torch knows no such device, or it is ``meta``, on which nothing can run.
    """
    if device is None:
        return None
    try:
        kind = torch.device(device).type
    except (RuntimeError, TypeError):
        raise ConfigError(f"device: {device!r} is not a device; write cuda or cpu") from None
    if kind == "meta":
        raise ConfigError("device: nothing runs on meta; write the device on which the model will run, as cuda or cpu")
    return kind


def misplaced(model: nn.Module, plan: Plan) -> str:
    """Which kernel of ``plan`` can't run on the device of the model's parameters, and what to do; empty if all can.

    Parameters on the meta device are ignored: they will be created on a device later.
    """
    here = {parameter.device.type for parameter in model.parameters()} - {"meta"}
    for planned in plan.kernels if here else ():
        needed = torch_device_type(planned.spec.hardware.chosen_for(plan.hardware).device_type)
        if needed == ANY_DEVICE or needed in here:
            continue
        paths = [each.site.path or "the model" for each in plan.decisions if each.spec == planned.spec]
        found = " and ".join(sorted(here))
        return (
            f"{planned.spec} at {paths[0]}{f' and {len(paths) - 1} more' * (len(paths) > 1)} runs on {needed}, and the "
            f"model's parameters are on {found}. Move the model to {needed}, or plan for where it is: "
            f"bind(..., device={found!r})"
        )
    return ""


def planned_elsewhere(model: nn.Module, plan: Plan) -> str:
    """What to do about a plan for the CPU, once the model's parameters are on an accelerator; empty if they are not."""
    here = {parameter.device.type for parameter in model.parameters()} - {"meta"}
    if plan.hardware.device_type != "cpu" or not here or "cpu" in here:
        return ""
    found = " and ".join(sorted(here))
    return (
        f"the plan is for the CPU, and the model's parameters are on {found} now, so kernels of {found} were passed "
        f"over. Undo the binding and bind again; or bind with device={found!r} from the start"
    )
