"""attention sites: one per config object that a model's attention modules read their interface's name from."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from veomni_core.changes import AttributeChange, Change
from veomni_core.ops.attention import FEATURES_OF_OPTIONS
from veomni_core.sites.functions import code_layers, current_forward, global_functions
from veomni_core.sites.site import Kernel, Site

_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
# transformers builds the mask that a kernel takes by the kernel's name; a kernel of ours says whose mask it takes in
# an attribute of this name.
MASK_INTERFACE = "veomni_mask_interface"


class AttentionInterface:
    """Selects the attention of one model through transformers' own interfaces.

    The interface's name stands in the config, which several models may share, so the model gets a config of its own.
    """

    def find(self, model: nn.Module, rule: str) -> Iterable[Site]:
        readers: dict[int, list[str]] = {}
        for path, module in model.named_modules():
            if reads_interface(module):
                readers.setdefault(id(module.config), []).append(path)
        for config_id, paths in readers.items():
            owner = next(path for path, module in model.named_modules() if id(vars(module).get("config")) == config_id)
            current = model.get_submodule(owner).config._attn_implementation  # type: ignore[union-attr]
            evidence = f"{len(paths)} modules read the attention interface from this config; it says {current}"
            needs = tuple(_needs(model, paths))
            yield Site("attention", owner, rule, "standard", evidence, own=str(current), needs=needs)

    def install(self, model: nn.Module, site: Site, kernel: Kernel | None) -> Iterable[Change]:
        return config_changes(model, site.path, "eager" if kernel is None else _interface_name(kernel))


def config_changes(model: nn.Module, path: str, name: str) -> Iterator[Change]:
    """A config of its own, set to the interface ``name``, for every module that shares the config at ``path``."""
    shared: Any = model.get_submodule(path).config
    if shared._attn_implementation == name:
        return
    own = copy.copy(shared)
    own._attn_implementation_internal = name
    for module in _holders(model, shared):
        yield AttributeChange(module, "config", own)


def reads_interface(module: nn.Module) -> bool:
    """Whether ``module`` takes its attention from transformers' interface, by the name in its config."""
    return "config" in vars(module) and _INTERFACE in dict(global_functions(current_forward(module)))


def _needs(model: nn.Module, paths: list[str]) -> Iterator[str]:
    """What the attention of these modules asks a kernel for in every call, as far as config and parameters tell."""
    modules: list[Any] = [model.get_submodule(path) for path in paths]
    if any(getattr(module.config, "attn_logit_softcapping", None) for module in modules):
        yield "softcap"
    if any("sinks" in dict(module.named_parameters(recurse=False)) for module in modules):
        yield "sinks"
    if any(getattr(module.config, "attention_dropout", 0.0) for module in modules):
        yield "dropout"
    options = {name for module in modules for name in _keywords(module)}
    yield from sorted({feature for option, feature in FEATURES_OF_OPTIONS.items() if option in options})
    configs = [module.config for module in modules]
    owners = [owner for owner in model.modules() if any(vars(owner).get("config") is config for config in configs)]
    # transformers says so where the model hands attention a mask, or a bias, that lengths can't tell.
    if not all(getattr(owner, "_supports_flash_attn", True) for owner in owners):
        yield "dense_mask"


def _keywords(module: nn.Module) -> Iterator[str]:
    """Every name by which ``module``'s forward hands something over in a call: they are constants of its code."""
    for layer in code_layers(current_forward(module)):
        for constant in layer.__code__.co_consts:
            yield from constant if isinstance(constant, tuple) else (constant,)


def _holders(model: nn.Module, config: Any) -> Iterator[nn.Module]:
    return (module for module in model.modules() if vars(module).get("config") is config)


def _interface_name(kernel: Kernel) -> str:
    """The name under which transformers knows ``kernel``; one that is new to it is registered under one of ours."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for name in ALL_ATTENTION_FUNCTIONS.valid_keys():
        if ALL_ATTENTION_FUNCTIONS[name] is kernel:
            return str(name)
    mask = getattr(kernel, MASK_INTERFACE, "sdpa")
    name = _new_name(kernel, mask, ALL_ATTENTION_FUNCTIONS.valid_keys())
    ALL_ATTENTION_FUNCTIONS.register(name, kernel)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS[mask])
    return name


def _new_name(kernel: Kernel, mask: str, taken: Iterable[str]) -> str:
    """transformers takes an interface for a FlashAttention where its name holds "flash": ours does where it is one."""
    stem = f"{kernel.__module__.rpartition('.')[2]}_{kernel.__qualname__}".replace(".", "_")
    name = f"veomni_{stem}" if ("flash" in stem) == ("flash" in mask) else f"veomni_{mask}"
    numbered = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
    return next(each for each in numbered if each not in taken)
