"""Calls a function after each module of a bound model, without changing what the model runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from veomni_transformers.changes.bypassed_children import BYPASSED


@contextmanager
def after_each_module(model: nn.Module, hook: Callable[[nn.Module, Any, Any], Any]) -> Iterator[None]:
    """Within it, ``hook(module, args, output)`` is called after each module of ``model``, as forward hooks are.

    Not after modules whose work a bound kernel does: a hook there, or one of all modules of the process, makes the
    module around them run its own code. The hooks are put where ``register_forward_hook`` puts them, since a bound
    module takes a call of that for a change of what was proven.
    """
    bypassed = {child for module in model.modules() for child in vars(module).get(BYPASSED, {}).values()}
    handles = []
    try:
        for module in model.modules():
            if module not in bypassed:
                handles.append(RemovableHandle(module._forward_hooks))
                module._forward_hooks[handles[-1].id] = hook
        yield
    finally:
        for handle in handles:
            handle.remove()
