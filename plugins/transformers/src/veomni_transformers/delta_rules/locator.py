"""Finds the layers that call a chunked delta rule, Kimi's too, and puts a kernel in its place in each of them.

The function is a global that the layer's forward names, as in transformers 5.23, or an attribute that the layer's
``__init__`` sets, as in 5.2. Either may be the modeling file's own code, or a package's that transformers found. The
file's own code is what is proven; the site says what the model has chosen.

A kernel that promises batch invariance also takes the place of the function for single tokens, where that is proven
too: a token that is decoded then has the bits that it has in training.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from torch import nn

from veomni_core.changes.change import Change
from veomni_core.descriptions.kernel_spec import EAGER, KernelSpec
from veomni_core.sites.site import Kernel, Site
from veomni_core.sites.walk import named_modules
from veomni_ops.delta_rule_samples import WIDE_HEADS, WIDEST_HEAD
from veomni_transformers.changes.property_change import PropertyChange
from veomni_transformers.delta_rules.proof import prove
from veomni_transformers.engine.engine_layout import EngineLayout
from veomni_transformers.forwards.delta_rule_call import delta_rule_call
from veomni_transformers.proving import probe
from veomni_transformers.proving.called_functions import callers, replaced
from veomni_transformers.proving.code_read import ReadsForward, module_at
from veomni_transformers.proving.code_reading import set_on_instance
from veomni_transformers.proving.functions import code_layers, current_forward
from veomni_transformers.proving.package_functions import chosen
from veomni_transformers.proving.proof import Proof, ProvenOnce
from veomni_transformers.proving.reachable_code import instructions, nested_code

_HEADS, _WIDTHS = ("key_heads", "value_heads"), ("key_width", "value_width")
_GLOBALS, _ATTRIBUTES = ("LOAD_GLOBAL", "LOAD_NAME"), ("LOAD_ATTR", "LOAD_METHOD")
_FUNCTION, _STEP = "function", "step"  # in a site's detail
_BOUNDARIES = "cu_seqlens"  # how a package's function is told of them


@dataclass(frozen=True)
class _Place:
    """A function that a module's forward calls; ``held_as`` is the kind of its name: a global's, or an attribute's."""

    path: str
    module: nn.Module
    name: str
    function: Any
    held_as: str
    why_not: str


class DeltaRules(ReadsForward):
    """Finds the function by name, proves it by its values, and replaces it for one model.

    Attributes:
        op_name: the op.
        called: what the function's name must match.
        steps: what that of the function for single tokens must match.
        stated_as: the attribute of a layer that states each size of a site.
    """

    op_name: ClassVar[str]
    called: ClassVar[re.Pattern[str]]
    steps: ClassVar[re.Pattern[str]]
    stated_as: ClassVar[Mapping[str, str]]

    def find(self, model: nn.Module, rule: str) -> Iterable[Site]:
        proofs: ProvenOnce[Proof] = ProvenOnce()
        steps = {place.path: place for place in _places(model, self.steps) if place.held_as == _FUNCTION}
        for place in _places(model, self.called):
            home = type(place.module).__module__
            if place.why_not:
                proof = Proof(None, place.why_not)
            else:
                proof = proofs.of(
                    (place.function, home), partial(prove, self.op_name, place.name, place.function, home)
                )
            sizes = _sizes(place.module, self.stated_as)
            own = chosen(place.function, home)
            untold = own != EAGER and not _names(current_forward(place.module), _BOUNDARIES)
            step = steps.get(place.path) if place.held_as == _FUNCTION and proof.variant is not None else None
            if step is not None:
                prove_step = partial(prove, self.op_name, step.name, step.function, home, is_step=True)
                step = step if proofs.of((step.function, home), prove_step).variant == proof.variant else None
            detail = {
                place.held_as: place.name,
                **({"untold": _BOUNDARIES} if untold else {}),
                **({_STEP: step.name} if step else {}),
            }
            proof = replace(proof, detail=detail, needs=_needs(sizes))
            yield proof.site(
                self.op_name,
                place.path,
                rule,
                dtype=probe.parameter_dtype(place.module),
                own=own,
                sizes=sizes,
            )

    def sharded(self, site: Site, layout: EngineLayout) -> Site:
        """Heads don't depend on each other, so a rank may have some of them; how many is not known here."""
        return replace(site, sizes={name: size for name, size in site.sizes.items() if name not in _HEADS})

    def install(self, model: nn.Module, site: Site, kernel: Kernel, spec: KernelSpec) -> Iterable[Change]:
        module, call = module_at(model, site.path), delta_rule_call(kernel)
        if "attribute" in site.detail:
            return [PropertyChange(module, site.detail["attribute"], call)]
        names = [
            site.detail[_FUNCTION],
            *([site.detail[_STEP]] if _STEP in site.detail and spec.batch_invariant else []),
        ]
        return replaced(module, names, call)


class GatedDeltaRules(DeltaRules):
    """Those of Qwen3-Next and its like, whose decay is one number per token and head."""

    op_name = "chunk_gated_delta_rule"
    called = re.compile(r"chunk_gated_delta_rule$")
    steps = re.compile(r"recurrent_gated_delta_rule$")
    stated_as: ClassVar[Mapping[str, str]] = {
        "key_heads": "num_k_heads",
        "value_heads": "num_v_heads",
        "key_width": "head_k_dim",
        "value_width": "head_v_dim",
    }


class KimiDeltaAttention(DeltaRules):
    """Those of Kimi-Linear and its like, whose decay is one number per key channel."""

    op_name = "kda"
    called = re.compile(r"chunk_(kda|kimi_delta_attention)$")
    steps = re.compile(r"recurrent_(kda|kimi_delta_attention)$")
    stated_as: ClassVar[Mapping[str, str]] = {
        "key_heads": "num_heads",
        "value_heads": "num_heads",
        "key_width": "head_dim",
        "value_width": "head_dim",
    }


def _places(model: nn.Module, called: re.Pattern[str]) -> Iterator[_Place]:
    for caller in callers(model, called.search):
        for name, function in caller.functions.items():
            # An attribute that the code reads may have the name of a global, which then is not what it calls.
            if callable(function) and name in _loaded(caller.forward, _GLOBALS):
                yield _Place(caller.path, caller.module, name, function, _FUNCTION, caller.why_not)
    for path, module in named_modules(model):
        held = {name: value for name, value in vars(module).items() if callable(value) and called.search(name)}
        for name in sorted(held.keys() & _loaded(current_forward(module), _ATTRIBUTES)) if held else ():
            yield _Place(path, module, name, held[name], "attribute", set_on_instance(module))


def _loaded(function: Any, operations: tuple[str, ...]) -> set[str]:
    """The names that the code of ``function``, or the code inside its decorators, loads by ``operations``."""
    codes = [code for layer in code_layers(function) for code in nested_code(layer.__code__)]
    return {each.argval for code in codes for each in instructions(code) if each.opname in operations}


def _names(function: Any, argument: str) -> bool:
    """Whether the code of ``function``, or the code inside its decorators, passes an argument of this name."""
    codes = (code for layer in code_layers(function) for code in nested_code(layer.__code__))
    constants = (constant for code in codes for constant in code.co_consts)
    return any(argument == each or (isinstance(each, tuple) and argument in each) for each in constants)


def _sizes(module: Any, stated_as: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    stated = {size: getattr(module, name, None) for size, name in stated_as.items()}
    return {size: (value,) for size, value in stated.items() if type(value) is int}


def _needs(sizes: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
    widths = [width for name in _WIDTHS for width in sizes.get(name, ())]
    return (WIDE_HEADS,) if max(widths, default=0) > WIDEST_HEAD else ()
