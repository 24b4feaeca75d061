"""Finds the layers that call a chunked gated delta rule, and puts a kernel in its place in each of them.

The function is a global that the layer's forward names, as in transformers 5.23, or an attribute that the layer's
``__init__`` sets, as in 5.2. Either may be the modeling file's own code, or a package's that transformers found. The
file's own code is what is proven; the site says what the model has chosen.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from veomni_core.changes.change import Change, PropertyChange
from veomni_core.descriptions.kernel_spec import KernelSpec
from veomni_core.descriptions.sharding import EngineLayout
from veomni_core.sites.called_functions import callers, replaced
from veomni_core.sites.delta_rules.proof import chosen, is_layer_of_a_function, prove
from veomni_core.sites.forwards.delta_rule_call import delta_rule_call
from veomni_core.sites.functions import code_layers, current_forward
from veomni_core.sites.proofs import probe
from veomni_core.sites.proofs.code_reading import set_on_instance
from veomni_core.sites.proofs.proof import Proof, ProvenOnce
from veomni_core.sites.proofs.reachable_code import instructions, nested_code
from veomni_core.sites.site import Kernel, Site

_NAME = re.compile(r"chunk_gated_delta_rule$")
_STATED_AS = {
    "key_heads": "num_k_heads",
    "value_heads": "num_v_heads",
    "key_width": "head_k_dim",
    "value_width": "head_v_dim",
}
_HEADS = ("key_heads", "value_heads")
_GLOBALS, _ATTRIBUTES = ("LOAD_GLOBAL", "LOAD_NAME"), ("LOAD_ATTR", "LOAD_METHOD")


@dataclass(frozen=True)
class _Place:
    """A function that a module's forward calls; ``held_as`` is the kind of its name: a global's, or an attribute's."""

    path: str
    module: nn.Module
    name: str
    function: Any
    held_as: str
    why_not: str


class GatedDeltaRules:
    """Finds the function by name, proves it by its values, and replaces it for one model."""

    def find(self, model: nn.Module, rule: str) -> Iterable[Site]:
        proofs: ProvenOnce[Proof] = ProvenOnce()
        for place in _places(model):
            home = type(place.module).__module__
            if place.why_not:
                proof = Proof(None, place.why_not)
            else:
                proof = proofs.of((place.function, home), partial(prove, place.name, place.function, home))
            proof = replace(proof, detail={place.held_as: place.name})
            yield proof.site(
                "chunk_gated_delta_rule",
                place.path,
                rule,
                dtype=probe.parameter_dtype(place.module),
                own=chosen(place.function, home),
                sizes=_sizes(place.module),
            )

    def sharded(self, site: Site, layout: EngineLayout) -> Site:
        """Heads don't depend on each other, so a rank may have some of them; how many is not known here."""
        return replace(site, sizes={name: size for name, size in site.sizes.items() if name not in _HEADS})

    def install(self, model: nn.Module, site: Site, kernel: Kernel, spec: KernelSpec) -> Iterable[Change]:
        module, call = model.get_submodule(site.path), delta_rule_call(kernel)
        if "attribute" in site.detail:
            return [PropertyChange(module, site.detail["attribute"], call)]
        return replaced(module, site.detail["function"], call)


def _places(model: nn.Module) -> Iterator[_Place]:
    for caller in callers(model, _NAME.search, is_layer_of_a_function):
        for name, function in caller.functions.items():
            # An attribute that the code reads may have the name of a global, which then is not what it calls.
            if callable(function) and name in _loaded(caller.forward, _GLOBALS):
                yield _Place(caller.path, caller.module, name, function, "function", caller.why_not)
    for path, module in model.named_modules():
        held = {name: value for name, value in vars(module).items() if _NAME.search(name) and callable(value)}
        for name in sorted(held.keys() & _loaded(current_forward(module), _ATTRIBUTES)) if held else ():
            yield _Place(path, module, name, held[name], "attribute", set_on_instance(module))


def _loaded(function: Any, operations: tuple[str, ...]) -> set[str]:
    """The names that the code of ``function``, or the code inside its decorators, loads by ``operations``."""
    codes = [code for layer in code_layers(function) for code in nested_code(layer.__code__)]
    return {each.argval for code in codes for each in instructions(code) if each.opname in operations}


def _sizes(module: Any) -> dict[str, tuple[int, ...]]:
    stated = {size: getattr(module, name, None) for size, name in _STATED_AS.items()}
    return {size: (value,) for size, value in stated.items() if type(value) is int}
