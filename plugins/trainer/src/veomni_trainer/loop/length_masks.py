"""Attention masks that depend on lengths alone, kept from one step for a step that is captured as a CUDA graph.

Where nothing is padded or packed, transformers builds no mask, or one of the lengths. It looks at values to know that,
for which it waits for the device. While a graph is captured it can't look, and would build a mask for any case, with
which attention is slower. So a captured forward is given the masks of a forward before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch import nn

from veomni_transformers.packed.packed_sequences import mask_functions
from veomni_transformers.proving.functions import current_forward, global_functions, with_globals

Masks = list[Any]  # in the order in which a forward builds them; None is a mask too
Function = Callable[..., Any]


class LengthMasks:
    """The functions by which ``model`` builds masks, for the time of one forward replaced in the modules that do."""

    def __init__(self, model: nn.Module) -> None:
        self._functions = {module: names for module in model.modules() if (names := mask_functions(module))}

    @contextmanager
    def kept(self, masks: Masks) -> Iterator[None]:
        """Put what is built in this context into ``masks``."""

        def keeping(function: Function) -> Function:
            def build(*args: Any, **kwargs: Any) -> Any:
                masks.append(function(*args, **kwargs))
                return masks[-1]

            return build

        masks.clear()
        with self._replaced(keeping):
            yield

    @contextmanager
    def given(self, masks: Masks) -> Iterator[None]:
        """Give ``masks`` in this context, and build none."""
        left = iter(masks)
        with self._replaced(lambda function: lambda *args, **kwargs: next(left)):
            yield

    @contextmanager
    def _replaced(self, replacement: Callable[[Function], Function]) -> Iterator[None]:
        before = {module: vars(module).get("forward") for module in self._functions}
        try:
            for module, names in self._functions.items():
                forward = current_forward(module)
                functions = {name: replacement(value) for name, value in global_functions(forward) if name in names}
                module.forward = MethodType(with_globals(forward, functions), module)
            yield
        finally:
            for module, own in before.items():
                if own is None:
                    vars(module).pop("forward", None)
                else:
                    module.forward = own
