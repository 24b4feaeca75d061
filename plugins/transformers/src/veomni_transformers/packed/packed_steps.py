"""The changes that tell a model's layers where packed sequences begin.

A model with layers that mix positions gets a forward that finds the boundaries in each step
(:mod:`veomni_transformers.packed.boundaries`). Where such a layer stays eager, it refuses packed sequences instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel

from veomni_core.binding.model_rules import WholeModelRule
from veomni_core.changes.change import Change, ForwardChange
from veomni_core.discovery.registry import Registry
from veomni_core.planning.plan import Plan
from veomni_transformers.packed.boundaries import with_boundaries
from veomni_transformers.packed.handed_boundaries import handing_on, receiving
from veomni_transformers.packed.handed_on import takes_boundaries
from veomni_transformers.packed.packed_sequences import links_without_boundaries, mask_functions, mixing_layers, named
from veomni_transformers.proving.functions import current_forward


class PackedSteps(WholeModelRule):
    """Changes nothing in a model without layers that mix positions."""

    def changes(self, model: nn.Module, plan: Plan, registry: Registry) -> Iterator[tuple[str, Change]]:
        """The forwards that find the boundaries of packed sequences, and pass them to the layers that need them."""
        yield from _handed_on(model, plan, registry)
        yield from _boundaries_found(model, plan, registry)


def _boundaries_found(model: nn.Module, plan: Plan, registry: Registry) -> Iterator[tuple[str, Change]]:
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


def _handed_on(model: nn.Module, plan: Plan, registry: Registry) -> Iterator[tuple[str, Change]]:
    """The changes by which bound layers are told of boundaries that the layers around them keep."""
    reading = [op for op in plan.ops if registry.op(op.op_name).reads_boundaries]
    bound = {decision.site.path for op in reading for decision in op.sites if decision.bound}
    links = {link: None for path in sorted(bound) for link in links_without_boundaries(model, path)}
    children: dict[str, list[str]] = {}
    for layer, child in links:
        children.setdefault(layer, []).append(child)
    for layer, names in children.items():
        outer = model.get_submodule(layer)
        if not takes_boundaries(outer):
            continue  # which the model refuses to be packed for
        for name in names:
            inner = outer.get_submodule(name)
            forward = receiving(current_forward(inner), takes_boundaries(inner))
            yield f"{layer}.{name}".strip("."), ForwardChange(inner, forward)
        yield layer, ForwardChange(outer, handing_on(current_forward(outer), names))


def _change(model: nn.Module, path: str, mixing: str) -> tuple[str, Change]:
    module = model.get_submodule(path)
    return path, ForwardChange(module, with_boundaries(current_forward(module), mixing))


def _parameters(module: nn.Module) -> tuple[str, ...]:
    return tuple(inspect.signature(current_forward(module)).parameters)
