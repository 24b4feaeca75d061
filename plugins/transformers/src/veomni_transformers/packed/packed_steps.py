"""The changes that pass the boundaries of packed sequences to a model's layers.

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
from veomni_transformers.packed.packed_sequences import mask_functions, mixing_layers, named
from veomni_transformers.proving.functions import current_forward

_NO_POSITIONS = "takes no position_ids, and passes its layers no boundaries of sequences. Pass each sequence alone"


class PackedSteps(WholeModelRule):
    """Changes nothing in a model without layers that mix positions."""

    def changes(self, model: nn.Module, plan: Plan, registry: Registry) -> Iterator[tuple[str, Change]]:
        """Forwards that find the boundaries of packed sequences in each step, and pass them to all layers."""
        for inner, mixing in mixing_layers(model, plan.ops, registry).items():
            yield _change(model, inner, mixing)
            for path, module in model.named_modules():
                around = path != inner and f"{inner}.".startswith(f"{path}." if path else "")
                if not around or not isinstance(module, PreTrainedModel):
                    continue
                # A model that has no position_ids, or builds masks, doesn't pass all boundaries to the one inside it:
                # its forward finds them too.
                has_none = "position_ids" not in inspect.signature(current_forward(module)).parameters
                if has_none or mask_functions(module):
                    yield _change(model, path, mixing or (has_none and f"{named(model, path)} {_NO_POSITIONS}") or "")


def _change(model: nn.Module, path: str, mixing: str) -> tuple[str, Change]:
    module = model.get_submodule(path)
    return path, ForwardChange(module, with_boundaries(current_forward(module), mixing))
