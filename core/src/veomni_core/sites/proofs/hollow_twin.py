"""A probe copy of a module with its real sizes and no memory, to see which tensors the module passes on."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from veomni_core.sites.proofs import probe

FREQUENCIES = "inv_freq"
# Eleven positions: no released model has eleven heads, so the length can be recognised among a tensor's dimensions.
BATCH, LENGTH = 2, 11
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
ZERO = torch.zeros((), dtype=torch.bfloat16, device="cpu")


def hollow_twin(module: nn.Module) -> nn.Module:
    """A copy of ``module`` in bfloat16: its tensors are expanded zeros, and its linears and convolutions give zeros."""
    twin = probe.bare_copy(module)
    for name, parameter in module._parameters.items():
        twin._parameters[name] = None if parameter is None else _zeros(parameter)  # type: ignore[assignment]
    for name, buffer in module._buffers.items():
        twin._buffers[name] = None if buffer is None else _buffer(name, buffer)
    for name, child in module._modules.items():
        twin._modules[name] = None if child is None else hollow_twin(child)
    if isinstance(width := getattr(module, "out_features", None), int):
        vars(twin)["forward"] = lambda x=None: ZERO.expand(*((BATCH, LENGTH) if x is None else x.shape[:-1]), width)
    elif type(module) in _CONVOLUTIONS:
        vars(twin)["forward"] = partial(_shape_alone, twin)
    elif type(module) is nn.MultiheadAttention:  # pools images, over thousands of positions
        vars(twin)["forward"] = lambda query, *_, **__: (ZERO.expand(query.shape), None)
    return twin


def _shape_alone(convolution: nn.Module, x: Tensor) -> Tensor:
    """Zeros of the shape that ``convolution`` returns for ``x``, found on the meta device."""
    on_meta: Any = probe.bare_copy(convolution)
    for name, parameter in convolution._parameters.items():
        on_meta._parameters[name] = None if parameter is None else parameter.to("meta")
    return ZERO.expand(on_meta(x.to("meta", ZERO.dtype)).shape)


def _zeros(tensor: Tensor) -> Tensor:
    return (ZERO if tensor.is_floating_point() else torch.zeros((), dtype=tensor.dtype)).expand(tensor.shape)


def _buffer(name: str, buffer: Tensor) -> Tensor:
    """Zeros, or random numbers for rotary frequencies: zeros would give every pair of dimensions the same angle."""
    return torch.rand(buffer.shape, generator=probe.generator()) + 0.1 if name.endswith(FREQUENCIES) else _zeros(buffer)


class LinearsOfZeros(TorchFunctionMode):
    """Within it ``F.linear`` gives the zeros of a hollow twin's weight without a product, for modules that call it.

    A product would first write the expanded zeros out: JetMoe's experts of attention took 1.3 s a call.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear and len(args) > 1 and not any(args[1].stride()):
            return args[1].new_zeros(()).expand(*args[0].shape[:-1], args[1].shape[0])
        return func(*args, **(kwargs or {}))
