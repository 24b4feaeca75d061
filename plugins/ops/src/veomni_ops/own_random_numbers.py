"""Runs code that draws random numbers, by dropout for instance, without the process's generators.

torch has one generator per device for all threads of a process. What is seeded or drawn there changes the numbers of
every other thread, and restoring a state repeats the numbers that others drew meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_RATES = ("dropout_p", "dropout")
_TRAINING = ("train", "training")


class OwnRandomNumbers(TorchDispatchMode):
    """Within it, the random numbers that torch draws in this thread come from generators of its own.

    Numbers that a kernel draws by itself on a GPU, rather than by an operator that takes a generator, don't.

    Args:
        seed: what its generators are seeded with.

    Attributes:
        drew: the operators that drew random numbers, by name.

    Example:
        >>> from torch.nn.functional import dropout
        >>> before, x = torch.get_rng_state(), torch.ones(4)
        >>> with OwnRandomNumbers(seed=1) as numbers:
        ...     first = dropout(x)
        ...     numbers.begin_again()
        ...     print(torch.equal(dropout(x), first), [*numbers.drew])
        True ['aten::bernoulli_']
        >>> torch.equal(torch.get_rng_state(), before)
        True
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.drew: dict[str, None] = {}
        self._seed = seed
        self._states: Mapping[torch.device, Tensor] = {}
        self._generators: dict[torch.device, torch.Generator] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether compiled functions run compiled within it."""
        return True

    def begin_again(self, states: Mapping[torch.device, Tensor] | None = None) -> None:
        """Draw the same numbers again, or those that follow ``states`` of generators, by device."""
        self._states = states or {}
        self._generators.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _is_random(func):
            return func(*args, **kwargs)
        names = [argument.name for argument in func._schema.arguments]
        given = {**_defaults(func), **dict(zip(names, args, strict=False)), **kwargs}
        device = _device_of(given)
        if given.get("generator") is not None or device.type == "meta" or not _draws(given):
            return func(*args, **kwargs)
        self.drew[func.name().partition(".")[0]] = None
        if "generator" in names:
            return func(*args, **{**kwargs, "generator": self._generator(device)})
        if (seeded := _with_generator(func)) is not None:
            return seeded(*args, **{**kwargs, "generator": self._generator(device)})
        if func is torch.ops.aten.native_dropout.default:
            return self._dropout(given["input"], given["p"])
        with self:
            found = func.decompose(*args, **kwargs)
        return func(*args, **kwargs) if found is NotImplemented else found

    def _dropout(self, x: Tensor, rate: float) -> tuple[Tensor, Tensor]:
        kept = torch.empty_like(x, dtype=torch.bool)
        kept.bernoulli_(1 - rate, generator=self._generator(x.device))
        return x * kept * (1 / (1 - rate) if rate < 1 else 0.0), kept

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            generator = self._generators[device] = torch.Generator(device)
            if device in self._states:
                generator.set_state(self._states[device])
            else:
                generator.manual_seed(self._seed)
        return self._generators[device]


@cache
def _is_random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


@cache
def _defaults(func: Any) -> Mapping[str, Any]:
    return {each.name: each.default_value for each in func._schema.arguments if each.has_default_value()}


@cache
def _with_generator(func: Any) -> Any:
    """The overload of ``func`` that takes a generator besides its arguments; ``None`` if there is none."""
    names = [argument.name for argument in func._schema.arguments]
    for overload in func.overloadpacket.overloads():
        other = getattr(func.overloadpacket, overload)
        others = [argument.name for argument in other._schema.arguments]
        if "generator" in others and [name for name in others if name != "generator"] == names:
            return other
    return None


def _draws(given: Mapping[str, Any]) -> bool:
    """Whether an operator with these arguments draws at all: at a dropout of 0, or in evaluation, it does not."""
    if any(given.get(name, True) is False for name in _TRAINING):
        return False
    return all(given.get(name, 1) != 0 for name in _RATES)


def _device_of(given: Mapping[str, Any]) -> torch.device:
    tensor = next((value for value in given.values() if isinstance(value, Tensor)), None)
    device = torch.device(given.get("device") or (tensor.device if tensor is not None else "cpu"))
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
