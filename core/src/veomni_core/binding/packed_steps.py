"""Which layers of a model mix positions, and the change that tells all of them where packed sequences begin.

An op whose kernels read boundaries says so (``OpSpec.reads_boundaries``). A model with sites of such ops gets a forward
that finds the boundaries in each step, see :mod:`veomni_core.sites.forwards.boundaries`. Where a site stays eager, it
refuses packed sequences instead of mixing them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel

from veomni_core.changes.change import Change, ForwardChange
from veomni_core.descriptions.kernel_spec import EAGER
from veomni_core.discovery.registry import Registry
from veomni_core.planning.decisions import SiteDecision
from veomni_core.planning.plan import Plan
from veomni_core.sites.forwards.boundaries import with_boundaries
from veomni_core.sites.functions import current_forward

OWNER = "packed steps"
# Mixers with a state that runs along the sequence have a parameter of this name: Mamba's, gated delta rules, Kimi's.
_DECAY = "A_log"
_WITHOUT_STATE = "causal_conv1d"


def packed_steps(model: nn.Module, plan: Plan, registry: Registry) -> Iterator[tuple[str, str, Change]]:
    """The changes, each as ``(module path, owner, change)``; none for a model without layers that read boundaries."""
    sites = [
        (op.op_name, op.config_field, decision)
        for op in plan.ops
        if registry.op(op.op_name).reads_boundaries
        for decision in op.sites
    ]
    if not sites:
        return
    *around, decoder = _models_around(model, [decision.site.path for _, _, decision in sites])
    mixing = _mixing(model, sites)
    yield _change(model, decoder, mixing)
    for path in around:
        # Such a model passes its decoder nothing that says where sequences begin, so it has to be asked itself.
        if "position_ids" not in inspect.signature(current_forward(model.get_submodule(path))).parameters:
            why = (
                f"{_named(model, path)} takes no position_ids, and tells its layers nothing of where a sequence begins"
            )
            yield _change(model, path, mixing or f"{why}. Pass each sequence alone")


def _change(model: nn.Module, path: str, mixing: str) -> tuple[str, str, Change]:
    module = model.get_submodule(path)
    return path, OWNER, ForwardChange(module, with_boundaries(current_forward(module), mixing))


def _mixing(model: nn.Module, sites: list[tuple[str, str, SiteDecision]]) -> str:
    """Which layer would mix packed sequences, and why; empty if none would."""
    for op_name, config_field, decision in sites:
        if not decision.bound and decision.site.own == EAGER:  # transformers tells a package's function itself
            return (
                f"{_named(model, decision.site.path)} would mix them: its {op_name} stays eager ({decision.reason}). "
                f"Pass each sequence alone, or choose a kernel for it ({config_field})"
            )
    told = {decision.site.path for op_name, _, decision in sites if op_name != _WITHOUT_STATE}
    for path, module in model.named_modules():
        if _DECAY in vars(module)["_parameters"] and path not in told:
            return (
                f"{_named(model, path)} would mix them: what it carries along the sequence is computed by its own "
                "code, which isn't told where a sequence begins. Pass each sequence alone"
            )
    return ""


def _named(model: nn.Module, path: str) -> str:
    return f"{path or 'the model'} ({type(model.get_submodule(path)).__name__})"


def _models_around(model: nn.Module, paths: list[str]) -> list[str]:
    """The paths of the models of transformers around all of ``paths``, the innermost last; else of the whole model."""
    around = [
        path
        for path, module in model.named_modules()
        if isinstance(module, PreTrainedModel) and all(f"{each}.".startswith(f"{path}." * bool(path)) for each in paths)
    ]
    return sorted(around, key=len) or [""]
