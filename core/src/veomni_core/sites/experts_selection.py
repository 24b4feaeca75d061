"""Which of transformers' experts implementations runs in a module, and how the module's eager code is selected.

transformers wraps the ``forward`` of an experts class. The wrapper looks up the implementation that the config names
(``grouped_mm``, ``batched_mm``, ...) in every call, and calls the wrapped eager code where none is named.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from veomni_core.errors import BindingError
from veomni_core.sites.functions import code_layers, current_forward
from veomni_core.spec import EAGER

_SELECTED_BY = "_experts_implementation"


def selected_implementation(module: nn.Module) -> str:
    """The implementation that runs in ``module`` while nothing is bound: ``eager``, or the one its config names."""
    if not _is_dispatched(module):
        return EAGER
    return str(getattr(vars(module).get("config"), _SELECTED_BY, None) or EAGER)


def eager_forward(module: nn.Module) -> Callable[..., Any]:
    """The eager code of ``module``, a function of ``(self, ...)``, without transformers' choice around it.

    Raises:
        BindingError: this transformers chooses in another way.
    """
    forward = current_forward(module)
    if _is_dispatched(module) and (eager := getattr(forward, "__wrapped__", None)) is not None:
        return eager  # type: ignore[no-any-return]
    raise BindingError(
        f"the eager code of {type(module).__name__} can't be selected: its config asks transformers for "
        f"{selected_implementation(module)!r}, in a way that is not known here. Build the model with "
        "experts_implementation='eager'"
    )


def _is_dispatched(module: nn.Module) -> bool:
    return any(_SELECTED_BY in layer.__code__.co_names for layer in code_layers(current_forward(module)))
