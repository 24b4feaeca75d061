"""A probe copy of a module with its real sizes and no memory, to see which tensors the module passes on."""

from __future__ import annotations

import re
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.overrides import TorchFunctionMode

from veomni_transformers.proving import probe
from veomni_transformers.proving.package_functions import leave_out_packages

FREQUENCIES = "inv_freq"
# Eleven positions: no released model has eleven heads, so the length can be recognised among a tensor's dimensions.
BATCH, LENGTH = 2, 11
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
with unset_fake_temporarily():  # the first model of a process may be bound under fake tensors
    ZERO = torch.zeros((), dtype=torch.bfloat16, device="cpu")
    _POSITIONS = ZERO.expand(BATCH, LENGTH, 1)  # what a linear is taken to get where an unknown argument left it None
_IN_PLACE = re.compile(r"\w*[a-z]_|__i(and|or|xor)__")  # torch's name of `x += y` is add_


def hollow_twin(module: nn.Module) -> nn.Module:
    """A copy of ``module`` in bfloat16: its tensors are expanded zeros, and its linears and convolutions give zeros.

    They give them on their input's device. A twin whose tensors are moved to meta runs there. It calls no package's
    function for GPUs (:mod:`veomni_transformers.proving.package_functions`).
    """
    twin = probe.bare_copy(module)
    leave_out_packages(twin)
    for name, parameter in module._parameters.items():
        twin._parameters[name] = None if parameter is None else _zeros(parameter)  # type: ignore[assignment]
    for name, buffer in module._buffers.items():
        twin._buffers[name] = None if buffer is None else _buffer(name, buffer)
    for name, child in module._modules.items():
        twin._modules[name] = None if child is None else hollow_twin(child)
    own = isinstance(module, nn.Linear) and type(module).forward is not nn.Linear.forward  # Llama 4's router
    if not own and isinstance(width := getattr(module, "out_features", None), int):
        vars(twin)["forward"] = partial(_linear, width)
    elif type(module) in _CONVOLUTIONS:
        vars(twin)["forward"] = partial(_shape_alone, twin)
    elif type(module) is nn.MultiheadAttention:  # pools images, over thousands of positions
        vars(twin)["forward"] = lambda query, *_, **__: (_zeros_like(query, *query.shape), None)
    return twin


def _linear(width: int, x: Tensor | None = None) -> Tensor:
    x = _POSITIONS if x is None else x
    return _zeros_like(x, *x.shape[:-1], width)


def _shape_alone(convolution: nn.Module, x: Tensor) -> Tensor:
    """Zeros of the shape that ``convolution`` returns for ``x``, found on the meta device."""
    on_meta: Any = probe.bare_copy(convolution)
    for name, parameter in convolution._parameters.items():
        on_meta._parameters[name] = None if parameter is None else parameter.to("meta")
    return _zeros_like(x, *on_meta(x.to("meta", ZERO.dtype)).shape)


def _zeros_like(x: Tensor, *shape: int) -> Tensor:
    """Zeros without memory, where ``x`` is."""
    return ZERO.to(x.device).expand(shape)


def _zeros(tensor: Tensor) -> Tensor:
    return (ZERO if tensor.is_floating_point() else torch.zeros((), dtype=tensor.dtype)).expand(tensor.shape)


def _buffer(name: str, buffer: Tensor) -> Tensor:
    """Zeros, or random numbers for rotary frequencies: zeros would give every pair of dimensions the same angle."""
    return torch.rand(buffer.shape, generator=probe.generator()) + 0.1 if name.endswith(FREQUENCIES) else _zeros(buffer)


class LinearsOfZeros(TorchFunctionMode):
    """Within it ``F.linear`` gives the zeros of a hollow twin's weight without a product, for modules that call it.

    A product would first write the expanded zeros out: JetMoe's experts of attention took 1.3 s a call. A tensor
    without memory that code adds to in place gets memory first.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.linear:
            x, weight = (args[n] if len(args) > n else kwargs[name] for n, name in enumerate(("input", "weight")))
            if weight.dim() == 2 and not any(weight.stride()):
                return _zeros_like(x, *x.shape[:-1], weight.shape[0])
        if func is Tensor.__setitem__ and _has_no_memory(args[0]):  # zeros are zeros, wherever a mask sets some
            return None
        if _is_in_place(getattr(func, "__name__", "")) and args and _has_no_memory(args[0]):
            args[0].data = args[0].clone()
        if kwargs.get("inplace"):
            kwargs["inplace"] = False
        return func(*args, **kwargs)


@cache
def _is_in_place(name: str) -> bool:
    return bool(_IN_PLACE.fullmatch(name))


def _has_no_memory(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and any(
        size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
