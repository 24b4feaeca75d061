"""The binding that a module belongs to, as its own forward looks it up."""

from __future__ import annotations

from torch import nn

from veomni_core.changes.bound_classes import BoundClasses
from veomni_core.changes.bound_subclass import MADE_BY


def binding_in(module: nn.Module) -> BoundClasses | None:
    """The first of :func:`bindings_in`: the binding's owner, whichever transformations are on top of it."""
    for kind in type(module).__mro__:
        classes = vars(kind).get(MADE_BY)
        if classes is not None and classes.binding is not None:
            return classes  # type: ignore[no-any-return]
    return None
