"""The binding that a module belongs to, as its own forward looks it up; modules that came into a model since bind."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import nn

from veomni_core.changes.bound_classes import BoundClasses
from veomni_core.changes.bound_subclass import MADE_BY

logger = logging.getLogger(__name__)


def binding_in(module: nn.Module) -> BoundClasses | None:
    """The first of :func:`bindings_in`: the binding's owner, whichever transformations are on top of it."""
    for kind in type(module).__mro__:
        classes = vars(kind).get(MADE_BY)
        if classes is not None and classes.binding is not None:
            return classes  # type: ignore[no-any-return]
    return None


def adopt(
    classes: BoundClasses, module: nn.Module, function: Callable[..., Any], path: str, name: str = "forward"
) -> None:
    """Bind ``module``, which came into the model since bind; undoing the binding unbinds it too.

    ``function`` becomes its method ``name``.
    """
    module.__class__ = classes.of(type(module), name, function, frozenset())
    classes.paths[module] = path
    classes.copies.add(module)


def remark(classes: BoundClasses, path: str, what: str) -> None:
    """Record what the kernel at ``path`` does in another way than was planned, and log each such fact once."""
    if classes.remarked.get(path) == what:
        return
    if what not in classes.remarked.values():
        logger.warning("%s: %s", path, what)
    classes.remarked[path] = what
