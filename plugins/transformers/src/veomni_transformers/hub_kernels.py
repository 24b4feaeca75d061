"""Keeps transformers' hub kernels (``use_kernels=True``) from replacing the forwards that a binding has replaced."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from veomni_core.binding.model_rules import WholeModelRule
from veomni_core.changes.change import AttributeChange, Change
from veomni_core.discovery.registry import Registry
from veomni_core.errors import BindingError
from veomni_core.planning.plan import Plan
from veomni_core.sites.walk import named_modules

_METHODS = ("set_use_kernels", "kernelize")  # before transformers 5.17, use_kernels = True calls the second


class NoHubKernels(WholeModelRule):
    """A bound model refuses hub kernels, and a model that has them is not bound."""

    def refuse(self, model: nn.Module) -> None:
        """Raise ``BindingError`` if ``model`` uses hub kernels."""
        if getattr(model, "use_kernels", False):
            raise BindingError(
                "this model was built with use_kernels=True: transformers puts hub kernels over its forwards at every "
                "train() and eval(), and would replace ours. Load it without, or take them off with bind_instead of "
                "veomni_bridges.use_kernels; model.use_kernels = False leaves them on"
            )

    def release(self, model: nn.Module) -> None:
        """Let modules that were copied from a bound model accept hub kernels again."""
        for _, module in named_modules(model):
            for method in _METHODS:
                if vars(module).get(method) is _refuse:
                    del vars(module)[method]

    def changes(self, model: nn.Module, plan: Plan, registry: Registry) -> Iterator[tuple[str, Change]]:
        """``model``, and models that are submodules of it, refuse hub kernels."""
        for _, module in named_modules(model):
            for method in _METHODS:
                if callable(getattr(type(module), method, None)):
                    yield "", AttributeChange(module, method, _refuse)


def _refuse(*_: Any, **__: Any) -> None:
    raise BindingError(
        "this model is bound, and transformers' hub kernels would silently replace its kernels. Call "
        "binding_of(model).undo() first"
    )
