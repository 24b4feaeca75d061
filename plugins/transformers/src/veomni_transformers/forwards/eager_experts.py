"""The forward of experts that run their eager code, although their config names another implementation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Forward = Callable[..., Any]
SELECTED_BY = "_experts_implementation"  # the config's attribute that names the implementation


def eager_until_set(eager: Forward, dispatched: Forward, named_at_bind: str) -> Forward:
    """A forward that runs ``eager`` while the config names ``named_at_bind``, and ``dispatched`` afterwards."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        run = eager if getattr(self.config, SELECTED_BY) == named_at_bind else dispatched
        return run(self, *args, **kwargs)

    vars(forward)["named_at_bind"] = named_at_bind
    return forward
