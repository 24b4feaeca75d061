"""Forwards of two layers, one of which calls the other and doesn't tell it where packed sequences begin.

The outer one lays what it was told beside the inner one for as long as it runs, and the inner one takes it from there.
A layer that is computed again in backward is called with the same arguments, and so tells the inner one again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from veomni_transformers.packed.handed_on import BOUNDARIES

Forward = Callable[..., Any]
_HANDED = "_boundaries_of_this_call"


def handing_on(forward: Forward, children: Iterable[str]) -> Forward:
    """``forward``, a layer's function of ``self``, which hands what it is told of boundaries to these child modules.

    Example:
        >>> from types import SimpleNamespace
        >>> convolve = receiving(lambda self, x, seq_idx=None: seq_idx, ("seq_idx",))
        >>> layer = SimpleNamespace(short=SimpleNamespace())
        >>> forward = handing_on(lambda self, x, **kwargs: convolve(self.short, x), ["short"])
        >>> forward(layer, 1.0, seq_idx="numbers"), forward(layer, 1.0)
        ('numbers', None)
    """
    children = tuple(children)

    @wraps(forward)
    def in_layer(self: Any, *args: Any, **kwargs: Any) -> Any:
        told = {name: kwargs[name] for name in BOUNDARIES if kwargs.get(name) is not None}
        if not told:
            return forward(self, *args, **kwargs)
        called = [getattr(self, name) for name in children]
        for child in called:  # by setattr, which torch.compile follows
            setattr(child, _HANDED, told)
        try:
            return forward(self, *args, **kwargs)
        finally:
            for child in called:
                delattr(child, _HANDED)

    return in_layer


def receiving(forward: Forward, takes: Iterable[str]) -> Forward:
    """``forward``, a layer's function of ``self``, which also reads what the layer around it hands on.

    Args:
        forward: the function.
        takes: the names of the arguments that it is given of that, where its caller doesn't give them.
    """
    takes = frozenset(takes)

    @wraps(forward)
    def in_layer(self: Any, *args: Any, **kwargs: Any) -> Any:
        told = getattr(self, _HANDED, None)
        if told is None:
            return forward(self, *args, **kwargs)
        return forward(self, *args, **{**{name: told[name] for name in told.keys() & takes}, **kwargs})

    return in_layer
