"""The changes that tell a model's layers where packed sequences begin.

A model with layers that mix positions gets a forward that finds the boundaries in each step
(:mod:`veomni_core.sites.forwards.boundaries`). Where such a layer stays eager, it refuses packed sequences instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel

from veomni_core.changes.change import Change, ForwardChange
from veomni_core.discovery.registry import Registry
from veomni_core.planning.packed_sequences import mixing_layers, named
from veomni_core.planning.plan import Plan
from veomni_core.sites.forwards.boundaries import with_boundaries
from veomni_core.sites.functions import current_forward

OWNER = "packed steps"


def packed_steps(model: nn.Module, plan: Plan, registry: Registry) -> Iterator[tuple[str, str, Change]]:
    """The changes, each as ``(module path, owner, change)``; none for a model without layers that mix positions."""
    for inner, mixing in mixing_layers(model, plan.ops, registry).items():
        yield _change(model, inner, mixing)
        for path, module in model.named_modules():
            around = path != inner and f"{inner}.".startswith(f"{path}." if path else "")
            if not around or not isinstance(module, PreTrainedModel):
                continue
            # Of where sequences begin, a model may hide from the one inside it what it is given: it is asked too.
            if mixing:
                yield _change(model, path, mixing)
            elif "position_ids" not in _parameters(module):
                why = f"{named(model, path)} takes no position_ids, and doesn't tell its layers where sequences begin"
                yield _change(model, path, f"{why}. Pass each sequence alone")


def _change(model: nn.Module, path: str, mixing: str) -> tuple[str, str, Change]:
    module = model.get_submodule(path)
    return path, OWNER, ForwardChange(module, with_boundaries(current_forward(module), mixing))


def _parameters(module: nn.Module) -> tuple[str, ...]:
    return tuple(inspect.signature(current_forward(module)).parameters)
