"""What towers compute from the sizes of pictures and sounds, once a step on the host, before a batch moves to a device.

Positions, bounds and windows depend on numbers that a tower reads back from the device, once per picture. transformers'
forwards take them from their keyword arguments where they are given (``image_cu_seqlens``).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from veomni_core.sites.walk import named_modules
from veomni_transformers.proving import probe
from veomni_transformers.proving.functions import code_layers, current_forward, global_functions, with_globals
from veomni_transformers.proving.hollow_twin import ZERO, LinearsOfZeros, hollow_twin
from veomni_transformers.towers.feature_calls import FeatureCall, feature_calls
from veomni_transformers.towers.smallest_input import own_class

_TAKEN = "kwargs"  # the parameter by which transformers' functions take what was computed before
_OPENS = "accepts_precomputed_kwargs"  # transformers' decorator of methods that pass them on
_POSITIONS = "get_rope_index"


class HostMetadata:
    """Computes, for batches of ``model``, the tensors that its towers would compute in forward.

    It keeps a copy of the towers' code without weights. Build it once; a call is as fast as what it computes.

    Args:
        model: a model of transformers, bound or not, on any device.

    Example:
        >>> from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
        >>> with torch.device("meta"):
        ...     model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig())
        >>> picture = {"pixel_values": torch.zeros(16, 1176), "image_grid_thw": torch.tensor([[1, 4, 4]])}
        >>> found = HostMetadata(model)(picture)
        >>> sorted(found)
        ['image_cu_seqlens', 'image_cu_window_seqlens', 'image_position_ids', 'image_window_index']
        >>> found["image_cu_seqlens"]
        tensor([ 0, 16], dtype=torch.int32)
    """

    def __init__(self, model: nn.Module) -> None:
        self._calls: list[tuple[Any, FeatureCall]] = []
        self._found: dict[str, Any] = {}
        self._positions: Any = None
        with probe.seeded():
            for path, calls in feature_calls(model):
                twin = hollow_twin(model.get_submodule(path)).eval()
                twin.__class__ = own_class(twin)  # whose methods don't divide their inputs over ranks
                without_layers(twin)
                for _, module in named_modules(twin):
                    self._record(module)
                self._calls += [(twin, call) for call in calls if not call.why_not]
                self._positions = twin if hasattr(type(twin), _POSITIONS) else self._positions

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments to add to ``batch``, whose tensors are on the CPU.

        Args:
            batch: the arguments of the model's forward. It stays as it is.

        Returns:
            Tensors on the CPU by the names of forward's keyword arguments. ``position_ids`` is among them where the
            model gives pictures positions of their own and ``batch`` has ``input_ids`` without positions. Empty for a
            model, or a version of transformers, whose forward takes none.
        """
        added: dict[str, Any] = {}
        with torch.no_grad(), probe.seeded(), LinearsOfZeros():
            for twin, call in self._calls:
                if batch.get(call.argument) is None:
                    continue
                self._found = {}
                method = getattr(twin, call.method)
                if not is_open(method):
                    continue
                taken = inspect.signature(method).parameters
                inputs = {name: _shape_alone(value) for name, value in batch.items() if name in taken}
                probe.attempt(partial(method, **inputs))  # what it found counts, not its end
                added |= {f"{call.modality}_{name}": value for name, value in self._found.items()}
            added |= self._text_positions(batch)
        return {name: value for name, value in added.items() if name not in batch}

    def _record(self, module: nn.Module) -> None:
        """Let the functions that ``module``'s forward calls, and that take what was computed before, be seen."""
        forward = current_forward(module)
        named = {name: value for name, value in global_functions(forward) if _takes_precomputed(value)}
        if named:
            seen = {name: self._recorder(function) for name, function in named.items()}
            vars(module)["forward"] = MethodType(with_globals(forward, seen), module)

    def _recorder(self, function: Any) -> Any:
        def record(*args: Any, **options: Any) -> Any:
            asked = _Asked()
            result = function(*args, **{**options, _TAKEN: asked})
            values = result if isinstance(result, tuple) else (result,)
            if len(values) == len(asked.names):
                pairs = zip(asked.names, values, strict=True)
                self._found |= {name: value for name, value in pairs if value is not None}
            return result

        return record

    def _text_positions(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        if self._positions is None or batch.get("input_ids") is None or batch.get("position_ids") is not None:
            return {}
        taken = inspect.signature(getattr(self._positions, _POSITIONS)).parameters
        inputs = {name: value for name, value in batch.items() if name in taken}
        needed = {name for name, each in taken.items() if each.default is each.empty and each.kind < each.VAR_KEYWORD}
        if not needed - {"self"} <= inputs.keys():
            return {}
        found, why_not = probe.attempt(lambda: getattr(self._positions, _POSITIONS)(**inputs))
        return {} if why_not else {"position_ids": found[0]}


def gives_positions(model: nn.Module) -> bool:
    """Whether ``model``, or a part of it, gives pictures and videos positions of their own."""
    return any(hasattr(type(module), _POSITIONS) for _, module in named_modules(model))


class _Asked(dict[str, Any]):
    """Notes which arguments a function looks for; it has none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def pop(self, name: str, *default: Any) -> Any:
        self.names.append(name)
        return super().pop(name, *default)


def _takes_precomputed(value: Any) -> bool:
    if not inspect.isfunction(value) or not value.__name__.startswith("get_"):
        return False
    return _TAKEN in inspect.signature(value).parameters


def is_open(method: Any) -> bool:
    """Whether ``method`` takes, beside its own arguments, those that were computed before."""
    layers = code_layers(getattr(method, "__func__", method))
    return any(layer.__code__.co_qualname.startswith(_OPENS) for layer in layers)


def without_layers(twin: nn.Module, after: int = 0) -> None:
    """Let the layers of each stack but the first ``after`` give back what they are given."""
    for _, layers in named_modules(twin):
        if isinstance(layers, nn.ModuleList):
            for number, layer in [*enumerate(layers)][after:]:
                if after:  # it may stand in the place of a first one too
                    layers[number] = layer = probe.bare_copy(layer)
                vars(layer)["forward"] = _first_of


def _first_of(*args: Any, **kwargs: Any) -> Any:
    return next(iter((*args, *kwargs.values())))


def _shape_alone(value: Any) -> Any:
    """Zeros without memory in place of pixels and sound; sizes and masks as they are."""
    return ZERO.expand(value.shape) if isinstance(value, Tensor) and value.is_floating_point() else value
