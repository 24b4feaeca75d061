"""What a step of a model with DeepSeek's sparse attention needs beside its sites: ranges for masks, and a share.

Ranges are given only to layers in which every module that takes a mask is bound. A run of the model's decoder, up to
its last layer, shows which layers get the mask.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import masking_utils

from veomni_core.binding.model_rules import WholeModelRule
from veomni_core.changes.change import Change, ForwardChange
from veomni_core.descriptions.kernel_spec import KernelSpec
from veomni_core.discovery.registry import Registry
from veomni_core.planning.plan import Plan
from veomni_core.sites.walk import named_modules
from veomni_transformers.forwards.indexer_loss import with_steps
from veomni_transformers.forwards.sparse_masks import always_builds, with_ranges
from veomni_transformers.proving import probe
from veomni_transformers.proving.functions import code_layers, current_forward, with_globals

_BUILDER, _MASK = "create_causal_mask", "attention_mask"


class SparseSteps(WholeModelRule):
    """Changes nothing in a model without bound sparse attention."""

    def changes(self, model: nn.Module, plan: Plan, registry: Registry) -> Iterator[tuple[str, Change]]:
        """Forwards that build ranges in the place of masks, and that say how much an indexer's loss counts."""
        bound: dict[str, dict[str, KernelSpec]] = {"dsa_attention": {}, "dsa_indexer": {}}
        for decision in plan.decisions:
            if decision.site.op_name in bound and decision.spec is not None:
                bound[decision.site.op_name][decision.site.path] = decision.spec
        if not bound["dsa_attention"]:
            return
        for path, module in named_modules(model):
            given = _given_masks(module) if _builds_masks(module) else ()
            if given and all(_takes_ranges(model, f"{path}.{name}", bound) for name in given):
                ranges = with_ranges(masking_utils.create_causal_mask)
                yield path, ForwardChange(module, with_globals(current_forward(module), {_BUILDER: ranges}))
        learns = any(dict(spec.settings).get("indexer_loss") for spec in bound["dsa_attention"].values())
        parameters = inspect.signature(current_forward(model)).parameters.values()
        if learns and any(each.kind is each.VAR_KEYWORD for each in parameters):  # which a model passes to all layers
            yield "", ForwardChange(model, with_steps(current_forward(model)))


def _builds_masks(module: nn.Module) -> bool:
    """Whether ``module`` has layers in a list, and may call transformers' function that builds causal masks."""
    layers = any(isinstance(child, nn.ModuleList) for child in module.children())
    codes = code_layers(current_forward(module)) if layers and hasattr(module, "config") else ()
    return any(code.__globals__.get(_BUILDER) is masking_utils.create_causal_mask for code in codes)


def _takes_ranges(model: nn.Module, layer: str, bound: dict[str, dict[str, KernelSpec]]) -> bool:
    """Whether all modules of ``layer`` that take a mask are bound."""
    layer = layer.removeprefix(".")
    for name, module in model.get_submodule(layer).named_modules():
        path = f"{layer}.{name}"
        if name and probe.takes(module, _MASK) and not any(path in sites for sites in bound.values()):
            return False
    return True


def _given_masks(module: Any) -> list[str]:
    """The names of the layers of the decoder ``module`` that get a mask which it always builds; none if unknown."""
    embeddings, mask = torch.zeros(1, 3, getattr(module.config, "hidden_size", 1)), object()
    for two in (False, True):  # what a layer returns: the hidden states, or something beside them
        given: list[str] = []
        try:
            built = {_BUILDER: lambda *args, **call: mask if always_builds(call) else None}
            run = with_globals(current_forward(module), built)
        except LookupError:
            return []
        copied = probe.without_layers(module, partial(_Layer, mask, given, two))
        with torch.no_grad():
            _, error = probe.attempt(partial(run, copied, inputs_embeds=embeddings, use_cache=False))
        if error.startswith(InterruptedError.__name__):
            return given
    return []


class _Layer(nn.Module):
    """Stands for a layer: notes that it is given ``mask``, and ends a forward if it is the last one."""

    def __init__(self, mask: object, given: list[str], two: bool, name: str, last: bool) -> None:
        super().__init__()
        self.seen = mask, given, two, name, last

    def forward(self, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        mask, given, two, name, last = self.seen
        if any(each is mask for each in (*args, *kwargs.values())):
            given.append(name)
        if last:
            raise InterruptedError
        return (hidden, None) if two else hidden
