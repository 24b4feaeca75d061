"""A property that is computed at its first use, in code that ``torch.compile`` traces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

Value = TypeVar("Value")


class ComputedOnce(Generic[Value]):
    """As ``functools.cached_property``, without the lock that Python 3.11's holds: each use of one breaks a graph.

    Example:
        >>> class Squares:
        ...     @ComputedOnce
        ...     def first(self):
        ...         print("computed")
        ...         return 1
        >>> squares = Squares()
        >>> squares.first, squares.first
        computed
        (1, 1)
    """

    def __init__(self, compute: Callable[[Any], Value]) -> None:
        self._compute, self.__doc__ = compute, compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> ComputedOnce[Value]: ...

    @overload
    def __get__(self, instance: object, owner: type) -> Value: ...

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        value = self._compute(instance)
        object.__setattr__(instance, self._name, value)  # found before this descriptor from now on; frozen classes too
        return value
