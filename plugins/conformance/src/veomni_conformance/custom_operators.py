"""Checks the custom operators that a kernel calls, by ``torch.library.opcheck``.

``torch.compile`` and FSDP rely on what an operator says of itself: which inputs it writes into, which results share
their memory, what shapes and dtypes it gives (its fake implementation), and where its autograd is registered.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from veomni_conformance.situations import reveal
from veomni_conformance.subject import Position, Subject

# Operators of PyTorch and of its device libraries: what they say of themselves is no kernel's fault.
_OF_PYTORCH = {"aten", "prim", "prims", "higher_order", "inductor", "profiler", "c10d", "_c10d_functional"}
_OF_PYTORCH |= {"torchvision", "npu"}
_CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")


class _Recorder(TorchDispatchMode):
    """Keeps the first call of each custom operator, with copies of its arguments."""

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """True: ``torch.compile`` compiles beneath this mode, which only watches.

        Beneath any other mode it compiles nothing. A kernel that compiles itself with ``fullgraph=True`` then raises,
        also in later calls without the mode (PyTorch 2.11, 2.13).
        """
        return True

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Any, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace not in _OF_PYTORCH and func not in self.calls:
            self.calls[func] = tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), (args, kwargs))
        return func(*args, **kwargs)


def check_custom_operators(subject: Subject, position: Position) -> Iterator[str]:
    """Record the operators of a forward and a backward, and check each on the arguments that it got."""
    recorder = _Recorder()
    yield from reveal("where its operators are recorded", lambda: _recorded(subject, position, recorder))
    for operator, (args, kwargs) in recorder.calls.items():
        yield from reveal(f"its operator {operator.name()}", lambda o=operator, a=args, k=kwargs: _checked(o, a, k))  # type: ignore[misc]


def _recorded(subject: Subject, position: Position, recorder: _Recorder) -> str | None:
    with recorder:
        found = subject.outcome(subject.draw(position))
    return subject.problem(found, subject.exact(position))


def _checked(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    found = torch.library.opcheck(operator, args, kwargs, test_utils=_CHECKS, raise_exception=False)
    wrong = {name: outcome for name, outcome in found.items() if outcome != "SUCCESS"}
    return next((f"fails {name}: {_first_line(outcome)}" for name, outcome in wrong.items()), None)


def _first_line(outcome: Any) -> str:
    """The message's first line that says something: opcheck begins with how to repeat the check."""
    return next((line.strip() for line in str(outcome).splitlines() if line.strip()), type(outcome).__name__)
