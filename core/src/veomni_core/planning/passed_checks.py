"""Which kernels of foreign code passed ``veomni verify`` on this machine: a file beside that of the failed ones.

It holds kernels with a digest alone. They may be chosen only where they are in it, so a file that is damaged or missing
makes plans refuse them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Set
from dataclasses import asdict
from pathlib import Path

from veomni_core.descriptions.hardware import Hardware
from veomni_core.descriptions.kernel_spec import KernelSpec
from veomni_core.planning.failed_checks import CheckedKernel, cache_file, warn_once, write_whole


def passed_file() -> Path:
    """The file, in the folder of :func:`~veomni_core.planning.failed_checks.cache_file`."""
    return cache_file().with_name("passed_checks.json")


def passed_checks() -> frozenset[CheckedKernel]:
    """What is in the file; nothing if there is none, or if it is damaged, which is a warning."""
    path = passed_file()
    try:
        return frozenset(CheckedKernel(**entry) for entry in json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError):
        return frozenset()
    except (OSError, ValueError, TypeError) as error:
        warn_once(path, f"can't be read ({error}), so no pass of veomni verify is remembered. Remove the file")
        return frozenset()


def remember_passed(passed: Iterable[CheckedKernel], failed: Iterable[CheckedKernel]) -> None:
    """Add what ``passed`` to the file, and remove what ``failed``."""
    known = passed_checks()
    kept = (known | {*passed}) - {*failed}
    if kept != known:
        write_whole(passed_file(), map(asdict, sorted(kept, key=str)))


def unverified(
    spec: KernelSpec,
    distribution: str,
    version: str,
    dtypes: tuple[str, ...],
    hardware: Hardware,
    passed: Set[CheckedKernel],
) -> str:
    """Why ``spec`` may not be chosen yet, as a phrase; empty if it may.

    Args:
        spec: a kernel; one without a digest needs no check.
        distribution, version: where it comes from, with the version that :meth:`PluginRecord.version_of` gives.
        dtypes: the dtypes in which it would run; without any, all that it declares.
        hardware: where it would run.
        passed: what :func:`passed_checks` returned.
    """
    if not spec.digest:
        return ""
    missing = [
        dtype
        for dtype in spec.dtypes
        if (not dtypes or dtype in dtypes)
        and CheckedKernel.here(str(spec), distribution, version, dtype, hardware) not in passed
    ]
    if not missing:
        return ""
    return (
        f"has not passed veomni verify in {', '.join(missing)} here, and its code is not the plugin's own "
        f"(veomni verify {distribution} --kernel {spec} checks it)"
    )
