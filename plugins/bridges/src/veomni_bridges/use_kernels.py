"""Binds a model that was loaded with transformers' ``use_kernels=True``, in place of its hub kernels."""

from __future__ import annotations

from collections.abc import Mapping
from types import MethodType
from typing import Any

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
        BindingError: a layer's forward was replaced once more, over the hub kernel's; or as of ``bind``. The hub
            kernels stay.
    """
    layers = [
        (path, layer)
        for path, module in model.named_modules()
        for layer in (module, *getattr(module, "_kernel_funcs", {}).values())
        if hasattr(type(layer), "kernel_layer_name") and "forward" in vars(layer)
    ]
    if foreign := [path for path, layer in layers if not _by_kernels(layer)]:
        raise BindingError(
            f"the forward of {', '.join(foreign)} was replaced after use_kernels=True had put hub kernels there, so "
            "they can't be taken off. Load the model without use_kernels, and call bind"
        )
    used, forwards = model.use_kernels, [(layer, vars(layer).pop("forward")) for _, layer in layers]
    model.set_use_kernels(False)
    try:
        return bind(model, config, **settings)
    except BaseException:
        for layer, forward in forwards:
            layer.forward = forward
        model._use_kernels = used
        raise


def _by_kernels(layer: Any) -> bool:
    """Whether the layer's own forward is a method, as ``kernels.kernelize`` makes it; a wrapper's is none."""
    forward = vars(layer)["forward"]
    return isinstance(forward, MethodType) and forward.__self__ is layer
