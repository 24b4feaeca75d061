"""``OpSlot``: a dispatch point that modeling code declares. While it is empty, the eager code runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from veomni_core.descriptions.references import load_if_installed
from veomni_core.errors import BindingError, BoundModelPickleError, SlotInUseError

Kernel = Callable[..., Any]


class _NoModel:
    """Holds the kernel of a slot for callers that name no model."""

    named = "a caller of bind() that named no model"


_NO_MODEL = _NoModel()


class OpSlot:
    """A place in modeling code where a kernel may be put.

    A slot in a class body belongs to the instance: ``self.norm`` is that instance's own slot. A slot at module level is
    shared by every model of that Python module. :func:`veomni_core.bind` leaves a shared slot empty and gives each
    ``nn.Module`` that it binds a slot of its own; a shared slot is filled only by calling :meth:`bind` on it.

    Reading ``use_non_eager_impl`` is a plain attribute access. :meth:`bound_kernel` returns the kernel itself, for code
    that wants to call it directly.

    Args:
        op_name: the op that the slot computes, as ``rms_norm``.
        variant: the op's variant.

    Example:
        >>> slot = OpSlot("rms_norm")
        >>> slot.use_non_eager_impl
        False
        >>> slot.bind(abs)
        >>> slot(-2)
        2
    """

    def __init__(self, op_name: str, variant: str = "standard") -> None:
        self.op_name = op_name
        self.variant = variant
        self.use_non_eager_impl = False
        self._kernel: Kernel | None = None
        self._holders: weakref.WeakSet[Any] = weakref.WeakSet()
        self._declared_in: str | None = None

    def __set_name__(self, owner: type, name: str) -> None:
        self._declared_in = f"{owner.__qualname__}.{name}"
        self._attribute = name

    def __get__(self, instance: Any, owner: type | None = None) -> OpSlot:
        if instance is None:
            return self
        slot = OpSlot(self.op_name, self.variant)
        # From now on the instance attribute is found before this descriptor, which defines no __set__.
        instance.__dict__[self._attribute] = slot
        return slot

    @property
    def use_eager_impl(self) -> bool:
        """Whether the modeling code should run its own eager code."""
        return not self.use_non_eager_impl

    @property
    def is_bound(self) -> bool:
        """Whether a kernel is in the slot."""
        return self.use_non_eager_impl

    has_kernel = is_bound  # VeOmni's word

    def bound_kernel(self) -> Kernel | None:
        """The kernel in the slot, or ``None``."""
        return self._kernel

    def bind(self, kernel: Kernel, holder: Any = None) -> None:
        """Put ``kernel`` into the slot.

        Args:
            kernel: a callable with the signature of the op's contract.
            holder: the model that uses the kernel; the slot holds only a weak reference to it. Without a holder, the
                kernel stays until :meth:`unbind` is called without one.

        Raises:
            BindingError: ``kernel`` is not callable, or this slot is a declaration in a class body.
            SlotInUseError: the slot holds another kernel for a model that is still alive.
        """
        if not callable(kernel):
            line = load_if_installed("veomni_ops.veomni_configs:line_for_slot") if isinstance(kernel, str) else None
            hint = f". A model binds it by its name: {line(self.op_name, kernel)}" if line else ""
            raise BindingError(f"{self!r}: a kernel must be callable, not a {type(kernel).__name__}{hint}")
        if self._declared_in:
            raise BindingError(
                f"{self!r} is declared in a class body and has one slot per instance: bind the instance's "
                f"(module.{self._attribute}), not {self._declared_in}"
            )
        if self._kernel is not None and self._kernel is not kernel and self._holders:
            held, wanted = _describe(self._kernel), _describe(kernel)
            if held == wanted:  # two objects with the same name, such as two closures of one function
                held, wanted = (f"{held} at {id(each):#x}" for each in (self._kernel, kernel))
            raise SlotInUseError(
                f"{self!r} already holds {held} for {self._describe_holders()}; binding {wanted} would "
                "change that model. A module-level slot is shared by all models of its module: undo the other binding "
                "first, or declare the slot in the class body, where each instance has its own"
            )
        self._kernel = kernel
        self._holders.add(_NO_MODEL if holder is None else holder)
        self.use_non_eager_impl = True

    def unbind(self, holder: Any = None) -> None:
        """Empty the slot, so that the modeling code runs its eager code again.

        With a ``holder``, the kernel is only released by that model, and stays while another model holds it.
        """
        if holder is None:
            self._holders.clear()
        else:
            self._holders.discard(holder)
        if not self._holders:
            self._kernel = None
            self.use_non_eager_impl = False

    def _describe_holders(self) -> str:
        """The live models that hold the slot's kernel, for messages."""
        named = (each.named if each is _NO_MODEL else f"a live {type(each).__qualname__}" for each in self._holders)
        return " and ".join(sorted(named))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._kernel is None:
            raise BindingError(f"{self!r} is empty: guard the call with `if slot.use_non_eager_impl`")
        return self._kernel(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> OpSlot:
        duplicate = OpSlot(self.op_name, self.variant)
        if self._kernel is not None:
            duplicate.bind(self._kernel)
        return duplicate

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._kernel is not None:
            raise BoundModelPickleError(f"{self!r} can't be pickled with its kernel: unbind() it, or undo the binding")
        return OpSlot, (self.op_name, self.variant)

    def __repr__(self) -> str:
        kernel = "eager" if self._kernel is None else _describe(self._kernel)
        return f"OpSlot({self.op_name!r}, {self.variant!r}: {kernel})"


def _describe(kernel: Kernel) -> str:
    """The kernel's module and name (plugins' functions often share a name), or its ``repr`` if it has no name."""
    name = getattr(kernel, "__qualname__", None)
    return f"{kernel.__module__}.{name}" if name else repr(kernel)
