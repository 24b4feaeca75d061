"""attention sites: one per config object that a model's attention modules read their interface's name from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from veomni_core.changes import Change
from veomni_core.ops.attention import FEATURES_OF_OPTIONS
from veomni_core.sites.config_changes import config_changes
from veomni_core.sites.functions import code_layers, current_forward, global_functions
from veomni_core.sites.interface_names import RegisteredInterface, registered
from veomni_core.sites.site import Kernel, Site
from veomni_core.spec import EAGER

_INTERFACE = "ALL_ATTENTION_FUNCTIONS"


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
        if kernel is None:
            return config_changes(model, site.path, EAGER)
        return _kernel_changes(model, site.path, registered(model, kernel))


def _kernel_changes(model: nn.Module, path: str, interface: RegisteredInterface | str) -> Iterator[Change]:
    if isinstance(interface, RegisteredInterface):
        yield interface
        interface = interface.name
    yield from config_changes(model, path, interface)


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
