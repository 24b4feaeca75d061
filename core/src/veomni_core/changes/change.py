"""Reversible changes to a model: an attribute of one object, and the ``forward`` of one module."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import MethodType
from typing import Any, Protocol

from torch import nn

from veomni_core.changes.bound_classes import BoundClasses
from veomni_core.changes.engine_forwards import engine_calls, engine_forward
from veomni_core.changes.forward_functions import reaches, replace_captured, wraps
from veomni_core.errors import BindingError


class Change(Protocol):
    """One reversible change to a model.

    Example:
        >>> norm = nn.LayerNorm(8)
        >>> change: Change = AttributeChange(norm, "eps", 0.1)
        >>> change.apply()
        >>> norm.eps = 0.2  # other code
        >>> change.overridden()
        'LayerNorm.eps was replaced'
        >>> change.revert()
        >>> norm.eps
        0.2
    """

    def apply(self) -> None:
        """Make the change."""

    def revert(self) -> None:
        """Restore what was there before :meth:`apply`, unless other code has set something else since."""

    def overridden(self) -> str:
        """How other code has overridden this change since, as a phrase; empty if it has not."""

    @property
    def place(self) -> Hashable:
        """A key for what is changed. Of two changes with the same key, the later one hides the earlier one."""


class _Missing:
    """Marks an attribute that did not exist before. A deepcopy keeps the class itself, so ``is`` still works."""


_PLAIN = (bool, int, float, str)


class AttributeChange:
    """Sets an attribute of one object, in the object's own ``__dict__``. The object is referenced weakly.

    Args:
        target: the object. It must have a ``__dict__`` and allow weak references.
        name: the attribute.
        value: what it is set to.

    Example:
        >>> norm = nn.LayerNorm(8)
        >>> change = AttributeChange(norm, "extra_repr", lambda: "changed")
        >>> change.apply()
        >>> norm
        LayerNorm(changed)
        >>> change.revert()
        >>> "extra_repr" in vars(norm)
        False
    """

    def __init__(self, target: Any, name: str, value: Any) -> None:
        self._target = weakref.ref(target)
        self.name, self.value = name, value
        self._before: Any = _Missing

    @property
    def target(self) -> Any:
        """The object, or ``None`` once it is freed."""
        return self._target()

    def apply(self) -> None:
        self._before = vars(self.target).get(self.name, _Missing)
        vars(self.target)[self.name] = self.value

    @property
    def place(self) -> Hashable:
        return (id(self.target), self.name)

    def overridden(self) -> str:
        target = self.target
        if target is None or vars(target).get(self.name) is self.value:
            return ""
        return f"{type(target).__name__}.{self.name} was replaced"

    def revert(self) -> None:
        if (target := self.target) is None or self.overridden():
            return
        if self._before is _Missing:
            vars(target).pop(self.name, None)
        else:
            vars(target)[self.name] = self._before

    def __deepcopy__(self, memo: dict[int, Any]) -> AttributeChange:
        if (target := self.target) is None:
            return copy.copy(self)
        duplicate = AttributeChange(copy.deepcopy(target, memo), self.name, copy.deepcopy(self.value, memo))
        duplicate._before = copy.deepcopy(self._before, memo)
        return duplicate


class ClassChange:
    """Gives one module a subclass of its class, whose attribute ``name`` is ``value``. Base of the changes below.

    ``guarded`` names the module's attributes on which the proof of the site depends. Setting one of them later raises
    :class:`~veomni_core.errors.SiteChangedError`, or makes the module run its own code again, depending on the
    config's ``on_change``.
    """

    def __init__(self, module: nn.Module, name: str, value: Any, guarded: Iterable[str] = ()) -> None:
        self._target = weakref.ref(module)
        self.name, self.value, self.guarded = name, value, frozenset(guarded)
        self.classes = BoundClasses()
        self._before: type[nn.Module] = type(module)
        self._bound: type[nn.Module] | None = None
        self._settings: dict[str, Any] = {}

    @property
    def target(self) -> Any:
        """The module, or ``None`` once it is freed."""
        return self._target()

    def apply(self) -> None:
        """Give the module its subclass.

        Raises:
            BindingError: Python can't assign another class to the module.
        """
        module = self.target
        own = vars(module)
        self._settings = {name: own[name] for name in self.guarded & own.keys() if type(own[name]) in _PLAIN}
        self._before = type(module)
        self._bound = self.classes.of(self._before, self.name, self.value, self.guarded)
        try:
            module.__class__ = self._bound
        except TypeError as error:
            raise BindingError(f"{type(module).__name__} can't be given a subclass of its class: {error}") from error

    @property
    def place(self) -> Hashable:
        return (id(self.target), self.name)

    def overridden(self) -> str:
        module = self.target
        if module is None or self._bound is None or isinstance(module, self._bound):
            return ""
        return f"its class became {type(module).__name__}"

    def written(self) -> str:
        """Which guarded settings were written past the guard, as in the instance's ``__dict__``; empty if none were."""
        module = self.target if self._settings else None
        if module is None or self._bound is None or not isinstance(module, self._bound):
            return ""  # its own code reads them
        own = vars(module)
        other = (name for name, value in self._settings.items() if name not in own or own[name] != value)
        return "; ".join(
            f"its {name} was set from {self._settings[name]!r} to {own.get(name, 'nothing')!r} past the guard after "
            "bind, and the kernel computes with the former"
            for name in other
        )

    def revert(self) -> None:
        if type(module := self.target) is self._bound:
            module.__class__ = self._before

    def __deepcopy__(self, memo: dict[int, Any]) -> ClassChange:
        duplicate = copy.copy(self)
        if self.target is None:
            return duplicate
        duplicate._target = weakref.ref(copy.deepcopy(self.target, memo))
        duplicate.classes = classes = copy.deepcopy(self.classes, memo)
        duplicate._before = classes.copied.get(self._before, self._before)
        duplicate._bound = classes.copied[self._bound] if self._bound else None
        return duplicate


class ForwardChange(ClassChange):
    """Replaces the ``forward`` of one module with a function of ``(self, ...)``.

    The function must use ``self`` to reach the module. If it closed over the module instead, every copy would run the
    original's weights. If transformers' distributed engine has given the module a forward of its own, that one stays,
    and calls the new one.

    Args:
        module: the module to change.
        forward: the new ``forward``.
        guarded: attributes of the module on which the proof of the site depends.
        calls: names of child modules or attributes that ``forward`` uses although its code does not mention them.

    Example:
        >>> import torch
        >>> linear = nn.Linear(4, 4)
        >>> change = ForwardChange(linear, lambda self, input: input @ self.weight.T)  # without the bias
        >>> change.apply()
        >>> linear(torch.zeros(4)).tolist()
        [0.0, 0.0, 0.0, 0.0]
        >>> isinstance(linear, nn.Linear), type(linear) is nn.Linear
        (True, False)
        >>> change.revert()
        >>> torch.equal(linear(torch.zeros(4)), linear.bias)
        True
    """

    def __init__(
        self, module: nn.Module, forward: Callable[..., Any], guarded: Iterable[str] = (), calls: Iterable[str] = ()
    ) -> None:
        super().__init__(module, "forward", forward, guarded)
        self.forward, self.calls = forward, frozenset(calls)
        self.keeps_original = False  # whether the function calls the forward that was there before

    def apply(self) -> None:
        """Give the module its subclass.

        Raises:
            BindingError: the instance has a ``forward`` of its own, which would hide the class's; or Python can't
                assign another class to the module.
        """
        self.refuse_own_forward()
        module = self.target
        self.keeps_original = reaches(self.forward, type(module).forward)
        super().apply()
        if engine_forward(module) is not None:
            replace_captured(module, self._before.forward, self._bound_forward)

    def refuse_own_forward(self) -> None:
        """Raise ``BindingError`` if the instance has a ``forward`` of its own in its ``__dict__``.

        The engine's forward is not refused if it calls that of the module's class.
        """
        module = self.target
        if "forward" in vars(module) and not engine_calls(module, type(module).forward):
            raise BindingError(
                f"{self.classes.paths.get(module, 'a module')} ({type(module).__name__}) has a forward of its own, "
                f"{setter_of(module)}: a kernel beneath it might not run. Take it off before bind, and put it on after"
            )

    def overridden(self) -> str:
        module, what = self.target, super().overridden()
        if what or module is None or self._bound is None or "forward" not in vars(module):
            return what
        calls = wraps(_beneath_hooks(module), self._bound_forward) or engine_calls(module, self._bound_forward)
        return "" if calls else f"it was given a forward of its own, {setter_of(module)}"

    def suspended(self) -> AbstractContextManager[None]:
        """Let the module run its former forward inside this context, whatever other code has put around or above it."""
        return _running(self.target, self._before.forward, self._bound_forward)

    def revert(self) -> None:
        module = self.target
        super().revert()
        if module is not None and self._bound is not None:
            replace_captured(module, self._bound_forward, self._before.forward)

    @property
    def _bound_forward(self) -> Any:
        """Not ``self.forward``: modules that are bound alike share one class, with the first one's function."""
        return vars(self._bound)["forward"]


@contextmanager
def _running(module: nn.Module, former: Callable[..., Any], bound: Callable[..., Any]) -> Iterator[None]:
    undo = replace_captured(module, bound, former)
    if "forward" not in vars(module):  # then one of the instance hides those of its class and of FSDP2's subclass
        vars(module)["forward"] = MethodType(former, module)
        undo = [lambda: vars(module).__delitem__("forward")]
    try:
        yield
    finally:
        for each in reversed(undo):
            each()


def _beneath_hooks(module: nn.Module) -> Callable[..., Any]:
    """The ``forward`` in the module's own ``__dict__``; if accelerate's hook set it, the one that the hook calls."""
    own: Any = vars(module)["forward"]
    hooked = getattr(getattr(own, "func", None), "__module__", "") == "accelerate.hooks"
    return vars(module).get("_old_forward", own) if hooked else own


def setter_of(module: nn.Module) -> str:
    """Who set the ``forward`` in the module's own ``__dict__``, as far as that can be told; empty if there is none."""
    if "forward" not in vars(module):
        return ""
    if (hook := vars(module).get("_hf_hook")) is not None:
        return f"set by accelerate's {type(hook).__name__} (accelerate.hooks.remove_hook_from_module takes it off)"
    own = vars(module)["forward"]
    own = getattr(own, "func", own)  # the function in a functools.partial
    return f"set to {getattr(own, '__module__', None)}.{getattr(own, '__qualname__', type(own).__name__)}"
