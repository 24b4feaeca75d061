"""Explains the error of a forward that fails because nobody moved the model to the device of its kernels."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import nn

from veomni_core.binding.model_rules import WholeModelRule
from veomni_core.binding.placement import misplaced
from veomni_core.changes.change import Change
from veomni_core.discovery.registry import Registry
from veomni_core.planning.plan import Plan


class PlacementNotes(WholeModelRule):
    """Puts notes into a model that is not yet on the device of its kernels; nothing into any other model.

    A wrapper may call the model's ``forward`` directly, which skips the model's hooks (PEFT's does). So the children
    that have parameters get a note too.
    """

    def changes(self, model: nn.Module, plan: Plan, registry: Registry) -> Iterator[tuple[str, Change]]:
        """The notes of ``model`` and of its children."""
        if misplaced(model, plan):
            for module in (model, *model.children()):
                if module is model or any(True for _ in module.parameters()):
                    yield "", PlacementNote(module, model, plan)


class PlacementNote:
    """A forward hook that adds a note to the error of a forward that fails. It goes after the first one that succeeds.

    It does not raise by itself: other libraries' hooks may move the weights to the right device during a forward.
    """

    around_forward = True  # a forward that replaces the module's own does not hide it

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
            and note not in getattr(error, "__notes__", [])
        ):
            error.add_note(note)

    def leave(self, module: nn.Module) -> None:
        """Take the hook off ``module``."""
        for number in [number for number, hook in module._forward_hooks.items() if hook is self]:
            del module._forward_hooks[number]
            module._forward_hooks_always_called.pop(number, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return self
