"""Runs parts of layers that hold no attention on the meta device: only the shapes of their results are needed.

On the CPU, the scans of state-space models and of linear attention would take most of a probe's time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from typing import Any

import torch
from torch import Tensor, nn

from veomni_core.sites.walk import named_modules
from veomni_transformers.attention.layer_forms import form_of
from veomni_transformers.proving import probe
from veomni_transformers.proving.hollow_twin import hollow_twin


def run_on_meta(twin: nn.Module, attention: Collection[str]) -> None:
    """Run the children of the layers in ``twin``'s module lists on meta, except for those that hold ``attention``."""
    shared: dict[Hashable, _OnMeta] = {}
    for path, layers in named_modules(twin):
        for index, layer in enumerate(layers if isinstance(layers, nn.ModuleList) else ()):
            for name, child in layer.named_children():
                inner = f"{path}.{index}.{name}".lstrip(".")
                is_kept = any(f"{each}.".startswith(f"{inner}.") for each in attention)
                if not is_kept and not isinstance(child, nn.ModuleList | nn.ModuleDict):
                    vars(child)["forward"] = _without_numbers(child, index, shared)


class _OnMeta:
    """Runs one child for all of its form, once for each form of their arguments; on the CPU where meta fails."""

    def __init__(self, child: nn.Module, run: Callable[..., Any]) -> None:
        self._twin, self._run = _moved_to_meta(child), run
        self._given: dict[Hashable, Any] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        key = (_form(args), _form(kwargs))
        if key not in self._given:
            with torch.device("meta"):
                result, error = probe.attempt(lambda: self._twin(*_mapped(args, "meta"), **_mapped(kwargs, "meta")))
            self._given[key] = self._run(*args, **kwargs) if error else _mapped(result, "cpu")
        return self._given[key]


def _without_numbers(child: nn.Module, index: int, shared: dict[Hashable, _OnMeta]) -> Callable[..., Any]:
    """A forward by which ``child`` gives what the first of its form in ``shared`` gave for arguments of this form."""
    run = child.forward
    mine: list[_OnMeta] = []  # found at the first call: most layers repeat an earlier one and are never called

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not mine:
            form = form_of(child, index)
            if form not in shared:
                shared[form] = _OnMeta(child, run)
            mine.append(shared[form])
        return mine[0](*args, **kwargs)

    return forward


def _moved_to_meta(child: nn.Module) -> nn.Module:
    twin = hollow_twin(child).eval()
    for module in twin.modules():
        if _holds_experts(module):
            vars(module)["forward"] = lambda hidden_states, *_, **__: hidden_states
        for tensors in (module._parameters, module._buffers):
            tensors.update({name: None if t is None else _on(t, "meta") for name, t in tensors.items()})  # type: ignore[misc]
    return twin


def _form(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if type(value) in (tuple, list):
        return tuple(map(_form, value))
    if type(value) is dict:
        return tuple((name, _form(each)) for name, each in value.items())
    return value if value is None or isinstance(value, bool | int | float | str) else id(value)


def _holds_experts(module: nn.Module) -> bool:
    """Whether ``module`` has weights of three dimensions, as experts do. Their output has the shape of their input."""
    weights = [weight for weight in module._parameters.values() if weight is not None]
    return not isinstance(module, nn.modules.conv._ConvNd) and any(weight.dim() > 2 for weight in weights)


def _mapped(value: Any, device: str) -> Any:
    if isinstance(value, Tensor):
        return _on(value, device)
    if type(value) in (tuple, list):
        return type(value)(_mapped(each, device) for each in value)
    return {name: _mapped(each, device) for name, each in value.items()} if type(value) is dict else value


def _on(tensor: Tensor, device: str) -> Tensor:
    """Zeros without memory of the tensor's shape and dtype."""
    return torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape)
