"""Kernels by digest: the spec of one says ``veomni_hub.factories:sha256_...``, and it is loaded when that is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from veomni_core import discover
from veomni_core.errors import ConfigError
from veomni_hub.calls import call_of
from veomni_hub.imported import imported
from veomni_hub.kernel_file import VARIABLE, listed
from veomni_hub.located import located
from veomni_ops.contract import contract_for

_PREFIX = "sha256_"


def __getattr__(name: str) -> Callable[..., Any]:
    """The kernel whose digest ``name`` has: its files are found, compared with their digests, and imported."""
    if not name.startswith(_PREFIX):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    kernel = next((each for each in listed() if each.digest == name.removeprefix(_PREFIX)), None)
    if kernel is None:
        raise ConfigError(
            f"no kernel that {VARIABLE} lists now has the digest {name.removeprefix(_PREFIX)}: set it to the file that "
            "the plan was made with, or make the plan again"
        )
    package = imported(located(kernel.package))
    contract = contract_for(discover().op(kernel.op), kernel.variant)
    return call_of(kernel, package, contract.reference)
