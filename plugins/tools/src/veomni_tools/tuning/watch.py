"""Watches one forward of a model for the module that calls a kernel, and what that module was called with."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from veomni_transformers.changes.bypassed_children import BYPASSED

Function = Callable[..., Any]
_Handles = dict[nn.Module, tuple[RemovableHandle, ...]]


@dataclass(frozen=True)
class Seen:
    """One call: the innermost module that was running, its arguments, and those of the function that it called."""

    path: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    function_args: tuple[Any, ...] = ()
    function_kwargs: dict[str, Any] | None = None


class _Enough(BaseException):
    """Ends a forward in which all has been seen. No handler of a model's own catches it."""


class Watch:
    """Watches the modules of ``model``.

    Its hooks are put on before a kernel is bound: to bound modules, a hook that comes later may be a change of what was
    proven. Modules whose work the bound kernel does itself lose theirs once it is bound, since a hook there makes the
    module around them run its own code.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._running: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.seen: Seen | None = None

    def calls_of(self, function: Function) -> Function:
        """``function``, at whose first call the forward ends."""

        @wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if not self._running:  # outside of a forward, as where masks are tried
                return function(*args, **kwargs)
            self.seen = Seen(*self._running[-1], args, kwargs)
            raise _Enough

        return watched

    def first_call(self, run: Function, bound: Callable[[], AbstractContextManager[Any]]) -> Seen | None:
        """The first call in ``run()`` of what is watched, with the model ``bound``; ``None`` if it is not called."""
        with self._watching() as handles, bound(), _ended():
            self._leave_alone_what_is_bypassed(handles)
            run()
        return self.seen

    def call_of_module(self, path: str, run: Function) -> Seen | None:
        """The first call in ``run()`` of the module at ``path``."""

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.seen = Seen(path, args, kwargs)
            raise _Enough

        handle = self._model.get_submodule(path).register_forward_pre_hook(hook, with_kwargs=True)
        try:
            with _ended():
                run()
        finally:
            handle.remove()
        return self.seen

    def _leave_alone_what_is_bypassed(self, handles: _Handles) -> None:
        for module in self._model.modules():
            for child in vars(module).get(BYPASSED, {}).values():
                for handle in handles.pop(child, ()):
                    handle.remove()

    @contextmanager
    def _watching(self) -> Iterator[_Handles]:
        handles: _Handles = {}

        def entered(path: str) -> Any:
            def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                self._running.append((path, args, kwargs))

            return hook

        def left(module: nn.Module, args: Any, result: Any) -> None:
            self._running.pop()

        try:
            for path, module in self._model.named_modules():
                before = module.register_forward_pre_hook(entered(path), with_kwargs=True)
                handles[module] = (before, module.register_forward_hook(left))
            yield handles
        finally:
            for handle in itertools.chain(*handles.values()):
                handle.remove()
            self._running.clear()


@contextmanager
def _ended() -> Iterator[None]:
    try:
        yield
    except _Enough:
        return
