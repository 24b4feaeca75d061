"""QuACK compiles its kernels when they are first called: for which GPU and dtypes, and a word to the user.

QuACK keeps compiled kernels below ``QUACK_CACHE_DIR``, or below the temporary directory where that is not set, so that
a machine compiles each of them once. None of our calls searches for configurations; what is compiled depends on dtypes,
widths and the GPU alone.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from quack.cache_utils import CACHE_ENABLED, get_cache_path
from torch import Tensor

logger = logging.getLogger(__name__)

_TARGET_SWITCHES = ("QUACK_ARCH", "CUTE_DSL_ARCH")
_PRODUCT_DTYPES = {torch.bfloat16, torch.float16}
_called: set[tuple[object, ...]] = set()


@contextmanager
def first_call(kernel: str, *parameters: object) -> Iterator[None]:
    """Log the first call with these parameters, before and after it: it compiles the kernel, or loads it from disk."""
    key = (kernel, *parameters)
    if key in _called:
        yield
        return
    where = f"kept in {get_cache_path()}" if CACHE_ENABLED else "not kept, since QUACK_CACHE_ENABLED is not 1"
    shown = ", ".join(map(str, parameters))
    logger.info("QuACK: first call of %s (%s): compiled now, in seconds, unless it is cached; %s", kernel, shown, where)
    started = time.perf_counter()
    yield
    _called.add(key)
    logger.info("QuACK: %s (%s) ready after %.1f s", kernel, shown, time.perf_counter() - started)


def check_dtypes(kernel: str, *operands: Tensor) -> None:
    """Raise where QuACK's products are not exact: they would take float32 operands in TF32.

    Raises:
        TypeError: the operands are not all bfloat16, or all float16.
    """
    dtypes = {operand.dtype for operand in operands}
    if len(dtypes) > 1 or not dtypes <= _PRODUCT_DTYPES:
        found = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise TypeError(
            f"{kernel} computes bfloat16 or float16, all operands alike; these are {found}: run it under "
            "autocast, or with weights in bfloat16"
        )


def check_target() -> None:
    """Raise where the environment makes QuACK compile for another GPU than the one that is here.

    Raises:
        RuntimeError: ``QUACK_ARCH`` or ``CUTE_DSL_ARCH`` names another compute capability.
    """
    if not torch.cuda.is_available():  # compiling ahead for a GPU that is elsewhere
        return
    major, minor = torch.cuda.get_device_capability()
    for switch in _TARGET_SWITCHES:
        target = os.environ.get(switch)
        if target and re.sub(r"\D", "", target) != f"{major}{minor}":
            raise RuntimeError(
                f"{switch}={target} makes QuACK compile for another GPU than this one, which has compute capability "
                f"{major}.{minor}: unset {switch}"
            )
