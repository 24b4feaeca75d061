"""QuACK compiles a kernel at its first call: logs that, and checks the target GPU and the dtypes.

QuACK caches compiled kernels in ``QUACK_CACHE_DIR``, or in the temporary directory if that is not set, so a machine
compiles each kernel once. Our calls never autotune: what is compiled depends only on dtypes, widths and the GPU. For a
norm's backward QuACK 0.6 also compiles once per power of two of rows.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from veomni_quack.versions import CACHE_ENABLED, get_cache_path

logger = logging.getLogger(__name__)

_TARGET_SWITCHES = ("QUACK_ARCH", "CUTE_DSL_ARCH")
_PRODUCT_DTYPES = {torch.bfloat16, torch.float16}
_called: set[tuple[object, ...]] = set()


@contextmanager
def first_call(kernel: str, *parameters: object) -> Iterator[None]:
    """Log before and after the first call with these parameters, which compiles the kernel or loads it from disk."""
    key = (kernel, *parameters)
    if key in _called:
        yield
        return
    where = f"cached in {get_cache_path()}" if CACHE_ENABLED else "not cached, since QUACK_CACHE_ENABLED is not 1"
    shown = ", ".join(map(str, parameters))
    logger.info("QuACK: first call of %s (%s): compiling takes seconds, unless it is cached; %s", kernel, shown, where)
    started = time.perf_counter()
    yield
    _called.add(key)
    logger.info("QuACK: %s (%s) ready after %.1f s", kernel, shown, time.perf_counter() - started)


def check_dtypes(kernel: str, *operands: Tensor) -> None:
    """Raise for dtypes that QuACK's GEMMs don't multiply exactly: float32 operands would be multiplied in TF32.

    Raises:
        TypeError: the operands are not all bfloat16, or all float16.
    """
    dtypes = {operand.dtype for operand in operands}
    if len(dtypes) > 1 or not dtypes <= _PRODUCT_DTYPES:
        found = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise TypeError(
            f"{kernel} needs all operands in bfloat16, or all in float16, but got {found}: run the model under "
            "autocast, or load its weights in bfloat16"
        )


def check_target() -> None:
    """Raise if an environment variable makes QuACK compile for a GPU other than the current one.

    Raises:
        RuntimeError: ``QUACK_ARCH`` or ``CUTE_DSL_ARCH`` names another compute capability.
    """
    if not torch.cuda.is_available():  # ahead-of-time compilation on a machine without a GPU
        return
    major, minor = torch.cuda.get_device_capability()
    for switch in _TARGET_SWITCHES:
        target = os.environ.get(switch)
        if target and re.sub(r"\D", "", target) != f"{major}{minor}":
            raise RuntimeError(
                f"{switch}={target} makes QuACK compile for a GPU other than the current one, which has compute "
                f"capability {major}.{minor}: unset {switch}"
            )
