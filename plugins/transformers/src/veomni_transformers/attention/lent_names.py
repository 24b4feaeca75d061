"""Names of attention that a config has on loan while its model is bound: they don't leave with the config.

A name that is registered for one bound model means nothing elsewhere. So the config that has it is given a subclass of
its class: its copies and pickles, and a model that is built on it, have the name that the config had before.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

NAME = "_attn_implementation_internal"
# Class attributes of the subclass: the class beneath it, the name on loan, and the name that leaves instead.
_PLAIN, _LENT, _FORMER = "_veomni_plain_class", "_veomni_lent_name", "_veomni_former_name"


def lend(config: Any, name: str, model: nn.Module, hand_over: Callable[[Any], Any]) -> None:
    """Let ``config``, which ``model`` has for itself, name the interface ``name`` until :func:`take_back`.

    ``hand_over`` is called with the config where another model is built on it. It gives ``model`` a copy, which it
    returns, and the config stays with the other one.
    """
    former = _leaving_name(config)
    take_back(config)
    keeper = weakref.ref(model)
    config.__class__ = _lending(type(config), name, former, lambda config: _until_freed(hand_over(config), keeper()))
    vars(config)[NAME] = name
    _until_freed(config, model)


def take_back(config: Any) -> None:
    """Give ``config`` its own class again, and, if it has a name on loan, the name that it had before."""
    lending = vars(type(config))
    if _PLAIN in lending:
        vars(config)[NAME] = _leaving_name(config)
        config.__class__ = lending[_PLAIN]


def _until_freed(config: Any, model: nn.Module | None) -> None:
    if model is not None:
        weakref.finalize(model, take_back, config).atexit = False


def _leaving_name(config: Any) -> Any:
    name, lending = vars(config).get(NAME), vars(type(config))
    return lending[_FORMER] if _PLAIN in lending and name == lending[_LENT] else name


def _lending(plain: Any, name: str, former: Any, hand_over: Callable[[Any], None]) -> type:
    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        return _restored, (plain, {**vars(self), NAME: _leaving_name(self)})

    def __setattr__(self: Any, key: str, value: Any) -> None:
        if key == NAME and value == name == vars(self).get(NAME):  # transformers does so where it builds a model on it
            hand_over(self)
            take_back(self)
        else:
            plain.__setattr__(self, key, value)

    namespace = {
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
        "__reduce_ex__": __reduce_ex__,
        "__setattr__": __setattr__,
        _PLAIN: plain,
        _LENT: name,
        _FORMER: former,
    }
    return type(plain)(plain.__name__, (plain,), namespace)  # type: ignore[no-any-return]


def _restored(kind: Any, state: dict[str, Any]) -> Any:
    config = kind.__new__(kind)
    vars(config).update(state)
    return config
