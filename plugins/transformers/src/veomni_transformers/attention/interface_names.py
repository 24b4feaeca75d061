"""Names under which kernels are registered in transformers: while a model uses them, and removed with the last use.

transformers looks attention and mask functions up by the same name, in two process-wide tables. The uses of a name are
counted, one per bound model. Undoing a binding, or freeing a model that is still bound, gives that model's use back.
"""

from __future__ import annotations

import copy
import itertools
import threading
import weakref
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import nn

from veomni_core.descriptions.kernel_spec import KernelSpec
from veomni_ops.attention import MASK_FEATURES
from veomni_transformers.attention.mask_builders import builder_of, saying_not_causal
from veomni_transformers.forwards.like_eager import like_eager

Function = Callable[..., Any]
# transformers' interface whose masks a kernel takes, by the feature that its spec declares.
_INTERFACES = {
    MASK_FEATURES["sdpa"]: "sdpa",
    MASK_FEATURES["flash_attention"]: "flash_attention_2",
    MASK_FEATURES["flex_attention"]: "flex_attention",
}

_uses: dict[str, int] = {}
_beneath: dict[str, str] = {}
_lock = threading.RLock()  # reentrant, since a finalizer may run while a name is being taken


class RegisteredInterface:
    """A change that registers ``function``, and the function that builds its mask, for one model.

    ``beneath`` is the name of the interface that ``function`` itself calls, where it is a wrapper around one.
    """

    def __init__(self, model: nn.Module, function: Function, mask: Function, name: str, beneath: str = "") -> None:
        self._model = weakref.ref(model)
        self.name = name
        self.function, self.mask = function, mask
        self._entry = (function, mask, beneath)
        self._release: Callable[[], Any] = lambda: None

    def apply(self) -> None:
        _take(self.name, *self._entry)
        finalizer = weakref.finalize(self._model(), _give_back, self.name)
        finalizer.atexit = False
        self._release = finalizer

    def revert(self) -> None:
        self._release()  # does nothing the second time: a finalizer runs once

    def suspended(self) -> AbstractContextManager[None]:
        """A no-op: a registered name that no config selects changes nothing."""
        return nullcontext()

    def overridden(self) -> str:
        """Always empty: nobody else has a reason to register this name."""
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


def registered(model: nn.Module, kernel: Function, spec: KernelSpec, replaces_eager: bool) -> RegisteredInterface | str:
    """The change that registers ``kernel`` in transformers, or its name if transformers has it registered already.

    transformers selects the function that builds a kernel's mask by the kernel's name, so both are registered: the
    function that ``spec`` names, or that of the interface whose masks it declares. In the place of eager attention, the
    kernel also gives what that gives beyond the op (:func:`like_eager`). Only there does it get eager attention's mask.

    Raises:
        KernelLoadError: the function that builds the mask can't be imported.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    mask = next((_INTERFACES[feature] for feature in spec.features if feature in _INTERFACES), "sdpa")
    given: Function | None = spec.load_mask()
    if given is eager_mask and not replaces_eager:  # with it queries that see no key give a mean, elsewhere zeros
        given = None
    if replaces_eager and given in (None, eager_mask):  # a mask of the kernel's own kind can't be read
        from_the_first_key = mask != _INTERFACES[MASK_FEATURES["flash_attention"]]
        kernel = like_eager(kernel, from_the_first_key, boolean_masks=given is None and mask == "sdpa")
        builder = saying_not_causal(given or builder_of(mask))
    else:
        builder = given or builder_of(mask)
    with _lock:
        for name in ALL_ATTENTION_FUNCTIONS.valid_keys():
            known = ALL_MASK_ATTENTION_FUNCTIONS.get(name)
            as_transformers_has_it = given is None and name not in _uses and known is ALL_MASK_ATTENTION_FUNCTIONS[mask]
            if ALL_ATTENTION_FUNCTIONS[name] is kernel and (known is builder or as_transformers_has_it):
                return RegisteredInterface(model, kernel, builder, name) if name in _uses else str(name)
        return RegisteredInterface(model, kernel, builder, _new_name(kernel, mask, ALL_ATTENTION_FUNCTIONS))


def interface_entries(name: str) -> list[tuple[Any, str, str]]:
    """The entries of the attention function ``name`` and of the one that builds its mask: table, key and label."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    tables = {
        "ALL_ATTENTION_FUNCTIONS": ALL_ATTENTION_FUNCTIONS,
        "ALL_MASK_ATTENTION_FUNCTIONS": ALL_MASK_ATTENTION_FUNCTIONS,
    }
    return [(table, name, f"{label}[{name!r}]") for label, table in tables.items()]


def calls_beneath(name: str) -> str:
    """The name of the interface that the interface ``name`` wraps; empty if it wraps none."""
    return _beneath.get(name, "")


def is_in_use(name: str) -> bool:
    """Whether ``name`` is in transformers' tables on behalf of bound models, and goes with the last of them."""
    return name in _uses


def _new_name(kernel: Function, mask: str, taken: Any) -> str:
    """A free name for ``kernel``, which contains "flash" exactly if the kernel takes FlashAttention's masks.

    transformers treats every interface whose name contains "flash" as FlashAttention.
    """
    while isinstance(kernel, partial):
        kernel = kernel.func
    named: Any = kernel if hasattr(kernel, "__qualname__") else type(kernel)
    stem = f"{named.__module__.rpartition('.')[2]}_{named.__qualname__}".replace(".", "_")
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
