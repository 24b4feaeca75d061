"""Takes single changes of a model back for a moment, so that one module runs what it ran before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

from veomni_core.changes.change import Change


@contextmanager
def suspended(changes: Iterable[Change]) -> Iterator[None]:
    """Take ``changes`` back inside this context, the last one first.

    A change says by a method ``suspended`` how, if reverting it and applying it again is not the way. What other code
    has overridden since stays as it is.

    Example:
        >>> from torch import nn
        >>> from veomni_core.changes.change import AttributeChange
        >>> norm = nn.LayerNorm(8, eps=0.2)
        >>> change = AttributeChange(norm, "eps", 0.1)
        >>> change.apply()
        >>> with suspended([change]):
        ...     norm.eps
        0.2
        >>> norm.eps
        0.1
    """
    with ExitStack() as stack:
        for change in reversed(list(changes)):
            stack.enter_context(_suspended(change))
        yield


def _suspended(change: Change) -> AbstractContextManager[None]:
    own: AbstractContextManager[None] | None = getattr(change, "suspended", lambda: None)()
    if own is not None:
        return own
    return nullcontext() if change.overridden() else _reverted(change)


@contextmanager
def _reverted(change: Change) -> Iterator[None]:
    change.revert()
    try:
        yield
    finally:
        change.apply()
