"""Sites that modeling code declares itself with an ``OpSlot``, in a class body or at module level.

A slot at module level is one object, shared by every model of that modeling code. So binding leaves it empty: each
bound module gets a clone of its ``forward`` in which the global's name refers to another slot, which holds the kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import FunctionType
from typing import Any

from torch import nn

from veomni_core.changes.change import Change, ForwardChange, setter_of
from veomni_core.descriptions.kernel_spec import KernelSpec
from veomni_core.descriptions.slot import OpSlot
from veomni_core.sites.site import Kernel, Site
from veomni_core.sites.walk import named_modules
from veomni_ops.veomni_names import OPS
from veomni_transformers.changes.property_change import PropertyChange
from veomni_transformers.proving.functions import code_layers, current_forward, global_functions, with_globals
from veomni_transformers.proving.probe import parameter_dtype
from veomni_transformers.proving.proof import Proof

_DECLARED = "declared by the modeling code"
# How many calls to follow from a forward to a function that uses a slot. Generated modeling code needs one: the forward
# calls a rotary or a loss function by its global name.
_DEEPEST = 3


class DeclaredSlots:
    """Finds declared slots. A slot's author states what it computes, so nothing is run to prove it."""

    def __init__(self) -> None:
        self._slots: dict[tuple[str, str, Kernel], OpSlot] = {}

    def find(self, model: nn.Module, rule: str) -> Iterable[Site]:
        unreached: dict[str, set[str]] = {}
        reached: dict[Any, dict[str, OpSlot]] = {}
        held: dict[type, dict[str, OpSlot]] = {}
        for path, module in named_modules(model):
            kind = type(module)
            if kind not in held:
                held[kind] = _slots_of_class(kind)
            for name, slot in held[kind].items():
                yield _site(slot, path, rule, module, {"attribute": name})
            if kind.__module__ not in unreached:
                unreached[kind.__module__] = set(_slots_of_module(kind.__module__))
            declared, forward = unreached[kind.__module__], kind.forward
            if forward not in reached:
                reached[forward] = _slots_reached(forward)
            for name, slot in reached[forward].items():
                declared.discard(name)
                site = _site(slot, path, rule, module, {"global": name})
                why_not = f"its forward can't be replaced: it was {setter_of(module)}"
                yield replace(site, variant=None, evidence=why_not) if setter_of(module) else site
        for module_name, names in unreached.items():
            for name in sorted(names):
                slot = _slots_of_module(module_name)[name]
                why = (
                    f"{module_name}.{name} is shared by every model of that module, and no forward here reads it by "
                    "name, so it can't be bound for one model: declare it in a class body"
                )
                unread = Proof(None, why, examined=False)
                yield unread.site(OPS.get(slot.op_name, slot.op_name), "", rule, own=_own(slot))

    def install(self, model: nn.Module, site: Site, kernel: Kernel, spec: KernelSpec) -> Iterable[Change]:
        module, slot = model.get_submodule(site.path), self._filled(site, kernel)
        if "attribute" in site.detail:
            yield PropertyChange(module, site.detail["attribute"], slot)
        else:
            forward = current_forward(module)
            yield ForwardChange(module, with_globals(forward, _replacements(forward, site.detail["global"], slot)))

    def _filled(self, site: Site, kernel: Kernel) -> OpSlot:
        """One slot for all sites of this model with the same kernel, so that modules bound alike share one class."""
        key = (site.op_name, site.variant or "", kernel)
        if key not in self._slots:
            self._slots[key] = OpSlot(site.op_name, site.variant or "")
            self._slots[key].bind(kernel)
        return self._slots[key]


def _site(slot: OpSlot, path: str, rule: str, module: nn.Module, detail: Mapping[str, str]) -> Site:
    said = Proof(slot.variant, _DECLARED, detail, declared=True)
    op_name = OPS.get(slot.op_name, slot.op_name)
    return said.site(op_name, path, rule, dtype=parameter_dtype(module), own=_own(slot))


def _own(slot: OpSlot) -> str:
    """What runs at the slot before binding: ``eager``, or a kernel that someone has put into the slot by hand."""
    return repr(slot.bound_kernel()) if slot.is_bound else "eager"


def _slots_of_class(kind: type) -> dict[str, OpSlot]:
    return {
        name: value
        for base in reversed(kind.__mro__)
        for name, value in vars(base).items()
        if isinstance(value, OpSlot)
    }


def _slots_of_module(name: str) -> dict[str, OpSlot]:
    return {key: value for key, value in vars(sys.modules.get(name, object)).items() if isinstance(value, OpSlot)}


def _slots_reached(function: Any, depth: int = 0) -> dict[str, OpSlot]:
    """The slots among the globals of ``function``, and of the functions that it calls by their global names."""
    found: dict[str, OpSlot] = {}
    for name, value in global_functions(function):
        if isinstance(value, OpSlot):
            found[name] = value
        elif _may_reach(value, depth):
            found |= _slots_reached(value, depth + 1)
    return found


def _replacements(function: Any, name: str, slot: OpSlot, depth: int = 0) -> dict[str, Any]:
    """The globals to replace in ``function``, so that it and the functions it calls find ``slot`` under ``name``."""
    replaced: dict[str, Any] = {}
    for each, value in global_functions(function):
        if isinstance(value, OpSlot):
            replaced |= {each: slot} if each == name else {}
        elif _may_reach(value, depth) and name in _slots_reached(value, depth + 1):
            replaced[each] = with_globals(value, _replacements(value, name, slot, depth + 1))
    return replaced


def _may_reach(value: Any, depth: int) -> bool:
    """Whether ``value`` is a function of a module that declares slots; others can't reach one, so they are not read."""
    if not isinstance(value, FunctionType) or depth >= _DEEPEST:
        return False
    return any(isinstance(each, OpSlot) for layer in code_layers(value) for each in layer.__globals__.values())
