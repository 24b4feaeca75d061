"""Names under which transformers knows kernels: registered while a model uses them, and removed with the last use.

transformers looks attention and mask functions up by one name, in two tables of the process. A name is counted per
model; undoing a binding, and freeing a model that is still bound, both give it back.
"""

from __future__ import annotations

import copy
import itertools
import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any

from torch import nn

Function = Callable[..., Any]
# transformers builds the mask that a kernel takes by the kernel's name; a kernel of ours says whose mask it takes in
# an attribute of this name.
MASK_INTERFACE = "veomni_mask_interface"

_uses: dict[str, int] = {}
_beneath: dict[str, str] = {}
_lock = threading.RLock()  # a finalizer may run while a name is being taken


class RegisteredInterface:
    """A change that registers ``function``, and the function that builds its mask, for one model.

    ``beneath`` is the name of the interface that ``function`` itself calls, where it is a wrapper around one.
    """

    def __init__(self, model: nn.Module, function: Function, mask: Function, name: str, beneath: str = "") -> None:
        self._model = weakref.ref(model)
        self.name = name
        self._entry = (function, mask, beneath)
        self._release: Callable[[], Any] = lambda: None

    def apply(self) -> None:
        _take(self.name, *self._entry)
        finalizer = weakref.finalize(self._model(), _give_back, self.name)
        finalizer.atexit = False
        self._release = finalizer

    def revert(self) -> None:
        self._release()  # a finalizer runs once

    def overridden(self) -> str:
        """Nobody else has a reason to register this name."""
        return ""

    @property
    def place(self) -> Hashable:
        return ("attention interface", self.name)

    def __deepcopy__(self, memo: dict[int, Any]) -> RegisteredInterface:
        function, mask, beneath = self._entry
        model: Any = self._model()
        duplicate = RegisteredInterface(copy.deepcopy(model, memo), function, mask, self.name, beneath)
        duplicate.apply()
        return duplicate


def registered(model: nn.Module, kernel: Function) -> RegisteredInterface | str:
    """The change that makes ``kernel`` known to transformers, or its name where transformers brings it itself."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    mask = getattr(kernel, MASK_INTERFACE, "sdpa")
    builder = ALL_MASK_ATTENTION_FUNCTIONS[mask]
    with _lock:
        for name in ALL_ATTENTION_FUNCTIONS.valid_keys():
            if ALL_ATTENTION_FUNCTIONS[name] is kernel:
                return RegisteredInterface(model, kernel, builder, name) if name in _uses else str(name)
        return RegisteredInterface(model, kernel, builder, _new_name(kernel, mask, ALL_ATTENTION_FUNCTIONS))


def calls_beneath(name: str) -> str:
    """The name of the interface that the one of ``name`` wraps; empty where it wraps none."""
    return _beneath.get(name, "")


def _new_name(kernel: Function, mask: str, taken: Any) -> str:
    """transformers takes an interface for a FlashAttention where its name holds "flash": ours does where it is one."""
    stem = f"{kernel.__module__.rpartition('.')[2]}_{kernel.__qualname__}".replace(".", "_")
    name = f"veomni_{stem}" if ("flash" in stem) == ("flash" in mask) else f"veomni_{mask}"
    numbered = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
    return next(each for each in numbered if each not in taken)


def _take(name: str, function: Function, mask: Function, beneath: str) -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    with _lock:
        _uses[name] = _uses.get(name, 0) + 1
        if beneath:
            _beneath[name] = beneath
        ALL_ATTENTION_FUNCTIONS.register(name, function)
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, mask)


def _give_back(name: str) -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    with _lock:
        _uses[name] -= 1
        if _uses[name]:
            return
        del _uses[name]
        _beneath.pop(name, None)
        for table in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
            table._global_mapping.pop(name, None)
