"""Kernels that a job's own code registers, a script's or a notebook's, without a distribution of their own."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from contextlib import suppress
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any
from uuid import uuid4

from veomni_core.descriptions.kernel_spec import KernelSpec
from veomni_core.discovery.discover import discover
from veomni_core.discovery.registry import PluginRecord, Registry
from veomni_core.errors import SpecError
from veomni_ops.veomni_names import OPS

THIS_PROCESS = "this-process"
"""Stands for the distribution in lists, plans and receipts."""


class KernelRegistry:
    """The kernels that this process has registered. There is one: ``veomni_core.KERNEL_REGISTRY``.

    They are kernels as any plugin's: listed, planned, checked, and in the receipt, where their distribution is
    ``this-process`` and their version a hash of the file that has the factory; in a notebook, each registration has a
    version of its own, and so has a function that was defined anew. No other process knows them. So each rank registers
    them, as it does where all run one script, and the command ``veomni`` and ``VEOMNI_FROZEN`` don't know them.
    ``auto`` takes one once ``bind(..., verify=True)`` has passed it.

    Example:
        >>> from veomni_core import KERNEL_REGISTRY, KernelSpec, discover
        >>> mine = KernelSpec("mine", "rms_norm", "standard", factory="veomni_torch.rms_norm:standard")
        >>> KERNEL_REGISTRY.register(mine)
        >>> discover().plugin_of(mine).distribution
        'this-process'
        >>> KERNEL_REGISTRY.register(KernelSpec("mine", "rms_nrm", "standard", factory="acme:norm"))
        Traceback (most recent call last):
            ...
        veomni_core.errors.SpecError: kernel rms_nrm/standard:mine: op 'rms_nrm' is unknown. Did you mean 'rms_norm'?
        >>> KERNEL_REGISTRY.unregister(mine)
    """

    def __init__(self) -> None:
        # Each with its version, and with what its factory's name stood for then.
        self._kernels: dict[tuple[str, str, str], tuple[KernelSpec, str, Any]] = {}

    def register(self, spec: KernelSpec) -> None:
        """Add ``spec`` to what is discovered in this process from now on.

        A kernel of the same name and factory replaces the earlier one: a notebook's cell may run again.

        Raises:
            SpecError: its op or variant is unknown, or an installed plugin, or other code, has that kernel already.
            LockMismatchError: ``VEOMNI_FROZEN`` is set. A lock file has only what is installed.
        """
        if not isinstance(spec, KernelSpec):
            raise SpecError(f"register takes KernelSpec(name, op_name, variant, factory), not {spec!r}")
        spec = _here(spec)
        known, *_ = self._kernels.get(spec.key, (spec,))
        if known.factory != spec.factory:
            raise SpecError(f"{spec} is registered already, with {known.factory}: unregister that, or name this anew")
        before = self._kernels
        self._kernels = {**before, spec.key: (spec, _version_of(_module_of(spec)), _code_of(spec))}
        try:
            if problem := _problem(discover()):
                raise SpecError(problem)
        except BaseException:
            self._kernels = before
            raise

    def unregister(self, spec: KernelSpec) -> None:
        """Take ``spec`` out again. What is bound keeps it."""
        self._kernels.pop(_here(spec).key, None)

    def records(self) -> list[PluginRecord]:
        """The kernels as discovery has a plugin's: a record for each state of the code that has some."""
        by_code: dict[tuple[str, str], list[KernelSpec]] = {}
        for key, (spec, version, code) in [*self._kernels.items()]:
            if code not in (None, now := _code_of(spec)):  # defined anew since: other code, which passed no check
                version = _version_of("")
                self._kernels[key] = (spec, version, now)
            by_code.setdefault((_module_of(spec), version), []).append(spec)
        return [
            PluginRecord(THIS_PROCESS, THIS_PROCESS, version, module, kernels=tuple(kernels))
            for (module, version), kernels in by_code.items()
        ]


KERNEL_REGISTRY = KernelRegistry()


def _module_of(spec: KernelSpec) -> str:
    return str(spec.factory).partition(":")[0]


def _code_of(spec: KernelSpec) -> Any:
    """What the factory's name stands for now; ``None`` where its module is not imported, or has no such name."""
    module, _, name = str(spec.factory).partition(":")
    with suppress(AttributeError):
        return attrgetter(name)(sys.modules.get(module))
    return None


def _here(spec: KernelSpec) -> KernelSpec:
    """``spec`` with the name that its op has here."""
    return replace(spec, op_name=OPS.get(spec.op_name, spec.op_name))


def _problem(found: Registry) -> str:
    """Why a kernel of this process can't be used, if there is one; the ones before it could be."""
    for record in found.plugins:
        if record.distribution == THIS_PROCESS and (record.problem or record.skipped):
            return record.problem or str(record.skipped[0])
    for key, claimants in found.conflicts.items():
        if any(THIS_PROCESS in each for each in claimants):
            return f"kernel {'{}/{}:{}'.format(*key)} is claimed by {' and '.join(claimants)}: name yours otherwise"
    return ""


def _version_of(module: str) -> str:
    """A hash of the file of ``module``; without one, as in a notebook, of nothing that another registration has."""
    loaded = sys.modules.get(module)
    try:
        spec = importlib.util.find_spec(module) if loaded is None else None
        code = Path(getattr(loaded, "__file__", None) or (spec and spec.origin) or "").read_bytes()
    except (ImportError, OSError, ValueError):
        code = uuid4().bytes
    return hashlib.sha256(code).hexdigest()[:12]
