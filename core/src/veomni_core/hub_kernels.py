"""transformers' ``use_kernels=True``, which puts hub kernels over the forwards that a binding has filled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from veomni_core.changes import AttributeChange
from veomni_core.errors import BindingError

_METHODS = ("set_use_kernels", "kernelize")  # the second is where use_kernels = True leads before transformers 5.17


def refuse_model_with(model: nn.Module) -> None:
    """Raise ``BindingError`` for a model that has hub kernels."""
    if getattr(model, "use_kernels", False):
        raise BindingError(
            "this model was built with use_kernels=True: transformers puts hub kernels over its forwards at every "
            "train() and eval(), and would replace ours. Set model.use_kernels = False first"
        )


def kept_out_of(model: nn.Module) -> Iterator[AttributeChange]:
    """The changes that make ``model`` and the models within it refuse hub kernels."""
    for module in model.modules():
        for method in _METHODS:
            if callable(getattr(type(module), method, None)):
                yield AttributeChange(module, method, _refuse)


def admit_again(model: nn.Module) -> None:
    """Take the refusal out of copies that were made of a bound model's modules."""
    for module in model.modules():
        for method in _METHODS:
            if vars(module).get(method) is _refuse:
                del vars(module)[method]


def _refuse(*_: Any, **__: Any) -> None:
    raise BindingError(
        "this model is bound, and transformers' hub kernels would silently replace its kernels. Call "
        "binding_of(model).undo() first"
    )
