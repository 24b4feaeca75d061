"""PyTorch's own operators on the simulated NPU: each is computed by the CPU on the memory that both share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from npu_sim import autocast
from npu_sim.memory import move_to, on_device, on_host, view_of

_libraries: list[torch.library.Library] = []


def register() -> None:
    """Register the fallback, and the operators that PyTorch asks of every device."""
    fallback = torch.library.Library("_", "IMPL")
    fallback.fallback(run_on_host, "PrivateUse1")
    fallback.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    autocast.register(aten)
    for name in ("as_strided", "view", "_reshape_alias", "unfold"):
        aten.impl(name, _by_the_cpu_kernel(getattr(torch.ops.aten, name).default), "PrivateUse1")
    for name in ("empty.memory_format", "empty_strided"):
        base, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.aten, base), overload or "default")
        aten.impl(name, _factory(operator), "PrivateUse1")
    aten.impl("_copy_from", _copy_from, "PrivateUse1")
    aten.impl("histc", functools.partial(run_on_host, _histc), "PrivateUse1")
    _libraries.extend((fallback, aten))


def run_on_host(operator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``operator`` on the host's view of every tensor, and give its results on the device.

    A result that is one of the arguments (in place, or ``out=``) stays that argument, also where it was resized; one
    that shares an argument's memory becomes a view of it. A tensor of the host raises, as on any device.
    """
    arguments = _Arguments(hosts_allowed=_takes_indices_of_the_host(operator))
    host_args = [arguments.to_host(argument) for argument in args]
    host_kwargs = {name: arguments.to_host(argument) for name, argument in kwargs.items()}
    return arguments.to_device(operator(*host_args, **host_kwargs))


@functools.cache
def _takes_indices_of_the_host(operator: Callable[..., Any]) -> bool:
    """PyTorch moves the indices of these to the device itself."""
    return str(operator).startswith(("aten.index", "aten._index_put_impl_"))


class _Arguments:
    """The arguments of one call, on the device and on the host. They may be lists of tensors."""

    def __init__(self, hosts_allowed: bool) -> None:
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self._hosts_allowed = hosts_allowed

    def to_host(self, argument: Any) -> Any:
        if isinstance(argument, Tensor):
            return self._tensor_to_host(argument)
        if isinstance(argument, (list, tuple)):
            return type(argument)([self.to_host(each) for each in argument])
        return torch.device("cpu") if isinstance(argument, torch.device) else argument

    def _tensor_to_host(self, argument: Tensor) -> Tensor:
        device = argument.device
        if device.type != "npu":
            if argument.dim() and not self._hosts_allowed:
                raise RuntimeError(f"expected all tensors to be on the same device, but found npu and {device}")
            return argument
        host = on_host(argument)
        self._pairs.append((argument, host))
        return host

    def to_device(self, result: Any) -> Any:
        if isinstance(result, Tensor):
            return self._tensor_to_device(result)
        if isinstance(result, (list, tuple)):
            return type(result)([self.to_device(each) for each in result])
        return result

    def _tensor_to_device(self, result: Tensor) -> Tensor:
        for argument, host in self._pairs:
            if host is result:
                return argument if argument.shape == result.shape else move_to(argument, result)
        memory = result.untyped_storage()._cdata
        for argument, host in self._pairs:
            if host.untyped_storage()._cdata == memory:
                return view_of(argument, result)
        return on_device(result)


def _by_the_cpu_kernel(operator: torch._ops.OpOverload) -> Callable[..., Tensor]:
    return lambda *args: operator._op_dk(torch._C.DispatchKey.CPU, *args)


def _factory(operator: torch._ops.OpOverload) -> Callable[..., Tensor]:
    def create(*args: Any, **kwargs: Any) -> Tensor:
        return on_device(operator(*args, **{**kwargs, "device": "cpu", "pin_memory": False}))

    return create


def _histc(values: Tensor, *args: float) -> Tensor:
    """Counts of whole numbers too, which accelerators give and the CPU refuses; transformers asks for them."""
    return torch.histc(values.double(), *args).to(values.dtype)


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    host_source, host_target = (on_host(t) if t.device.type == "npu" else t for t in (source, target))
    host_target.copy_(host_source)
    return target
