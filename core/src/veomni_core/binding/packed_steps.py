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
from veomni_core.planning.packed_sequences import mask_functions, mixing_layers, named
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
            # A model that has no position_ids, or builds masks, doesn't pass the one inside it all that it was given of
            # where sequences begin: it is asked too.
            why = mixing
            if has_none := "position_ids" not in _parameters(module):
                none = f"{named(model, path)} takes no position_ids, and doesn't tell its layers where sequences begin"
                why = mixing or f"{none}. Pass each sequence alone"
            if has_none or mask_functions(module):
                yield _change(model, path, why)


def _change(model: nn.Module, path: str, mixing: str) -> tuple[str, str, Change]:
    module = model.get_submodule(path)
    return path, OWNER, ForwardChange(module, with_boundaries(current_forward(module), mixing))


def _parameters(module: nn.Module) -> tuple[str, ...]:
    return tuple(inspect.signature(current_forward(module)).parameters)
