"""A simulated Ascend NPU, for tests without one: a device of PyTorch, and torch_npu's operators on it.

It shows that the plugin calls the library as its schemas and its documentation say, and that the mathematics is
right. It says nothing of times, of the hardware's rounding, or of limits that the library doesn't document.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

from accelerate.utils import is_npu_available
from transformers.utils import is_torch_npu_available

from npu_sim import operators
from npu_sim.backend import start
from veomni_core.descriptions import hardware

_SITE = Path(__file__).parent / "site"


@contextlib.contextmanager
def simulated_npu() -> Iterator[None]:
    """While this is entered, one Ascend 910B is here and ``torch_npu`` is installed."""
    module = start()
    operators.register()
    sys.path.insert(0, str(_SITE))
    module.present = True
    _forget_what_is_installed()
    try:
        yield
    finally:
        module.present = False
        sys.path.remove(str(_SITE))
        sys.modules.pop("torch_npu", None)
        _forget_what_is_installed()


def _forget_what_is_installed() -> None:
    importlib.invalidate_caches()
    for answer in (is_torch_npu_available, is_npu_available, hardware._installed_version):
        answer.cache_clear()
