"""Compares the device that a bound model is on with the devices that its kernels can run on.

``bind(model, device="cuda")`` plans a model for the GPU while it is on the CPU, since trainers move it there. If nobody
moves it, its first forward fails with whatever error the kernel's library raises. The receipt says so beforehand, and a
note on that error explains the cause. A model that was planned for the CPU runs anywhere; the receipt says that it
moved.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Hashable, Iterator
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
        paths = [
            decision.site.path or "the model"
            for op in plan.ops
            for decision in op.sites
            if decision.spec == planned.spec
        ]
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


def placement_notes(model: nn.Module, plan: Plan) -> Iterator[PlacementNote]:
    """The notes for a model that is not yet on the device of its kernels; nothing for any other model.

    A wrapper may call the model's ``forward`` directly, which skips the model's hooks (PEFT's does). So the children
    that have parameters get a note too.
    """
    if misplaced(model, plan):
        for module in (model, *model.children()):
            if module is model or any(True for _ in module.parameters()):
                yield PlacementNote(module, model, plan)


class PlacementNote:
    """A forward hook that adds a note to the error of a forward that fails. It goes after the first one that succeeds.

    It does not raise by itself: other libraries' hooks may move the weights to the right device during a forward.
    """

    def __init__(self, module: nn.Module, model: nn.Module, plan: Plan) -> None:
        self._module = weakref.ref(module)
        self._hook = _Hook(weakref.ref(model), plan)

    @property
    def place(self) -> Hashable:
        return (id(self._module()), "placement")

    def apply(self) -> None:
        module = self._module()
        assert module is not None, "a binding's changes are applied while its model lives"
        module.register_forward_hook(self._hook, always_call=True)

    def overridden(self) -> str:
        """Always empty: if the hook is gone, a forward succeeded."""
        return ""

    def revert(self) -> None:
        if (module := self._module()) is not None:
            self._hook.leave(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> PlacementNote:
        return self


class _Hook:
    """The forward hook itself. Copies of a model share it."""

    def __init__(self, model: weakref.ref[nn.Module], plan: Plan) -> None:
        self._model, self._plan = model, plan

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():  # keep the hook out of compiled graphs
            return
        if output is not None:
            self.leave(module)
            return
        error, model = sys.exception(), self._model()
        if (
            error is not None
            and model is not None
            and (note := misplaced(model, self._plan))
            and note not in _notes_of(error)
        ):
            error.add_note(note)

    def leave(self, module: nn.Module) -> None:
        """Take the hook off ``module``."""
        for number in [number for number, hook in module._forward_hooks.items() if hook is self]:
            del module._forward_hooks[number]
            module._forward_hooks_always_called.pop(number, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return self


def _notes_of(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])
