"""Binds a model that was loaded with transformers' ``use_kernels=True``, in place of its hub kernels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MethodType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from veomni_core import Binding, OpsConfig, bind
from veomni_core.errors import BindingError


def bind_instead(model: PreTrainedModel, config: OpsConfig | Mapping[str, Any], **settings: Any) -> Binding:
    """Take the hub kernels off ``model``, and put proven kernels into it. Undoing the binding gives the eager model.

    transformers can put hub kernels on and not off again: setting ``use_kernels = False`` leaves them running.

    Args:
        model: a model that was loaded with ``use_kernels=True``.
        config, **settings: as for :func:`veomni_core.bind`.

    Raises:
        BindingError: a layer's forward was replaced once more, over the hub kernel's; a hub kernel runs in a function
            that all models share; or as of ``bind``. The hub kernels stay.
    """
    if problems := list(_problems(model)):
        raise BindingError(
            f"hub kernels can't be taken off: {'; '.join(problems)}. Load the model without use_kernels, and call bind"
        )
    layers = [layer for layer in model.modules() if _is_kernelized(layer)]
    used, forwards = model.use_kernels, [vars(layer).pop("forward") for layer in layers]
    model.set_use_kernels(False)
    try:
        return bind(model, config, **settings)
    except BaseException:
        for layer, forward in zip(layers, forwards, strict=True):
            layer.forward = forward
        model._use_kernels = used
        raise


def _problems(model: nn.Module) -> Iterator[str]:
    """Which hub kernels can't be taken off, and why."""
    shared: dict[nn.Module, str] = {}
    for path, module in model.named_modules():
        if _is_kernelized(module) and _own_forward(module) is None:
            yield f"the forward of {path} was replaced since"
        shared |= {layer: name for name, layer in getattr(module, "_kernel_funcs", {}).items()}
    for layer, name in shared.items():
        # Where no kernel was found, kernels.kernelize sets the function's own forward once more.
        if _is_kernelized(layer) and _own_forward(layer) is not type(layer).forward:
            yield f"the function {name} runs one, and all models of this process share it"


def _is_kernelized(layer: nn.Module) -> bool:
    """Whether the layer is one that hub kernels are for, and has a forward of its own."""
    return hasattr(type(layer), "kernel_layer_name") and "forward" in vars(layer)


def _own_forward(layer: nn.Module) -> Any:
    """The function that ``kernels.kernelize`` has made the layer's method; ``None`` if others have wrapped it since."""
    forward = vars(layer)["forward"]
    return forward.__func__ if isinstance(forward, MethodType) and forward.__self__ is layer else None
