"""What checks of kernels found on this machine: which passed, how close to the tolerance, and which failed, and how.

``veomni verify`` keeps a result for each kernel and dtype, in one file of the user's cache. A plugin may ship
certificates in its package, made on its author's machines: they say what was seen elsewhere. A result counts as *here*
if nothing that it depends on has changed since (:class:`~veomni_conformance.this_machine.CheckedKernel`). The file is a
memory, not a condition: one that is damaged, or can't be written, is a warning.
"""

from __future__ import annotations

import datetime
import importlib.util
import json
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from veomni_conformance.this_machine import CERTIFICATES, CheckedKernel, ThisMachine
from veomni_core.descriptions.hardware import Hardware
from veomni_core.descriptions.kernel_spec import KernelSpec
from veomni_core.discovery.registry import PluginRecord
from veomni_core.errors import HostError
from veomni_core.planning.evidence import HERE, NEVER, Evidence
from veomni_ops.own_kernels import THIS_PROCESS

logger = logging.getLogger(__name__)
_ELSEWHERE = "verified elsewhere"
_MOST_NAMED = 2
_LONGEST_REASON = 200
_PASSED, _FAILED = "passed", "failed"
_DAMAGE = (OSError, ValueError, TypeError, KeyError, AttributeError)
_warned: set[Path] = set()


@dataclass(frozen=True)
class Certificate:
    """That a kernel passed its op's contract.

    Attributes:
        checked: the kernel, its dtype, and where.
        date: the day, as ``2026-11-23``.
        cases: for each case of the contract, the largest error of the values and of the gradients, each as a share of
            its tolerance. What runs without a comparison, such as a refusal, has 0 for both.

    Raises:
        ValueError: a case is beyond its tolerance, or there is none: that is no pass.
    """

    checked: CheckedKernel
    date: str
    cases: Mapping[str, tuple[float, float]]

    def __post_init__(self) -> None:
        if not self.cases:
            raise ValueError("a certificate needs cases")
        for name, shares in self.cases.items():
            if len(shares) != 2 or not all(isinstance(share, (int, float)) and 0 <= share <= 1 for share in shares):
                raise ValueError(f"case {name!r} must have two shares of its tolerance from 0 to 1, got {shares!r}")

    @classmethod
    def of_today(cls, checked: CheckedKernel, cases: Mapping[str, tuple[float, float]]) -> Certificate:
        """A certificate of what has just passed."""
        return cls(checked, _today(), dict(cases))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Certificate:
        """The certificate that ``dataclasses.asdict`` turned into ``data``."""
        cases = {str(name): tuple(shares) for name, shares in data["cases"].items()}
        return cls(CheckedKernel(**data["checked"]), str(data["date"]), cases)


@dataclass(frozen=True)
class FailedCheck:
    """That a kernel failed, when, and how."""

    checked: CheckedKernel
    date: str
    reason: str

    def __str__(self) -> str:
        checked = self.checked
        return (
            f"failed veomni verify in {checked.dtype} on {self.date}: {self.reason} "
            f"(veomni verify {checked.distribution} --kernel {checked.kernel} checks it again)"
        )


class Ledger(Evidence):
    """What is known of kernels on this machine.

    Args:
        machine: this machine.
        passed: what passed here; read from the user's cache without it.
        failed: what failed here; the same.
    """

    def __init__(
        self,
        machine: ThisMachine,
        passed: Iterable[Certificate] | None = None,
        failed: Iterable[FailedCheck] | None = None,
    ) -> None:
        self.machine = machine
        kept, gone = read_ledger() if passed is None or failed is None else ((), ())
        self._passed = {each.checked: each for each in (kept if passed is None else passed)}
        self._failed = {each.checked: each for each in (gone if failed is None else failed)}
        # Looked up first: the rest hashes the files of plugins, 80 ms of a bind where one kernel had failed.
        self._have_failed = {checked.kernel for checked in self._failed}
        self._shipped: dict[str, tuple[Certificate, ...]] = {}

    @classmethod
    def here(cls, hardware: Hardware) -> Ledger:
        """What is known of kernels on the ``hardware`` of this machine."""
        return cls(ThisMachine(hardware))

    def failures(self, spec: KernelSpec, plugin: PluginRecord, dtypes: Iterable[str]) -> tuple[str, ...]:
        """How ``spec`` of ``plugin`` failed here in one of ``dtypes``, as phrases."""
        if str(spec) not in self._have_failed:
            return ()
        checked = (self.machine.checked(spec, plugin, dtype) for dtype in dtypes)
        return tuple(str(self._failed[each]) for each in checked if each in self._failed)

    def standing(self, spec: KernelSpec, plugin: PluginRecord, dtypes: Iterable[str]) -> str:
        """How ``spec`` stands in ``dtypes``: ``HERE``, ``NEVER``, or verified elsewhere, and where.

        The worst dtype decides.
        """
        standings = [self._standing(spec, plugin, dtype) for dtype in dtypes]
        return max(standings, key=lambda each: (each == NEVER, each != HERE), default=NEVER)

    def standing_on_any_device(self, spec: KernelSpec, plugin: PluginRecord) -> str:
        """How ``spec`` stands, for who doesn't ask which device is here: detecting one may import torch.

        ``certified on`` the devices where it passed in all of its dtypes, with the files and packages that are here.
        """
        dtypes: dict[str, set[str]] = {}
        ours = [checked for checked in self._passed if self.machine.has_the_same_software(checked, plugin)]
        for checked in ours:
            if (checked.kernel, checked.version) == (str(spec), plugin.version_of(spec)):
                dtypes.setdefault(checked.hardware, set()).add(checked.dtype)
        devices = [device for device, passed in dtypes.items() if {*spec.dtypes} <= passed]
        return f"certified on {', '.join(devices)}" if devices else self.standing(spec, plugin, spec.dtypes)

    def how_to_check(self, spec: KernelSpec, plugin: PluginRecord) -> str:
        """What a user does to have ``spec`` checked here, as a phrase."""
        if plugin.distribution == THIS_PROCESS:  # which the command does not know
            return "bind(..., verify=True) checks it"
        return f"veomni verify {plugin.distribution} --kernel {spec} checks it"

    def _standing(self, spec: KernelSpec, plugin: PluginRecord, dtype: str) -> str:
        if not self._passed and not self._shipped_by(plugin):
            return NEVER  # without a hash of its files
        here = self.machine.checked(spec, plugin, dtype)
        if here in self._passed:
            return HERE
        others = [
            each.checked
            for each in (*self._passed.values(), *self._shipped_by(plugin))
            if (each.checked.kernel, each.checked.dtype, each.checked.distribution)
            == (here.kernel, dtype, here.distribution)
        ]
        if not others:
            return NEVER
        wheres = list(dict.fromkeys(", ".join(other.differences(here)) or here.hardware for other in others))
        more = f" and {len(wheres) - _MOST_NAMED} more" if len(wheres) > _MOST_NAMED else ""
        return f"{_ELSEWHERE}: {'; '.join(wheres[:_MOST_NAMED])}{more}"

    def _shipped_by(self, plugin: PluginRecord) -> tuple[Certificate, ...]:
        if plugin.name not in self._shipped:
            file = _shipped_file(plugin)
            self._shipped[plugin.name] = read_certificates(file) if file else ()
        return self._shipped[plugin.name]


def cache_folder() -> Path:
    """Where this machine's results are: ``VEOMNI_CACHE``, or else ``veomni`` in the user's cache folder."""
    if folder := os.environ.get("VEOMNI_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "veomni")


def store() -> Path:
    """The file of this machine's results."""
    return cache_folder() / "checked_kernels.json"


def read_ledger() -> tuple[tuple[Certificate, ...], tuple[FailedCheck, ...]]:
    """What passed and what failed, as the file has it; nothing if there is none, or if it is damaged: a warning."""
    try:
        return _ledger_in(store().read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return (), ()
    except _DAMAGE as error:
        _warn_of_damage(store(), error)
        return (), ()


@lru_cache(maxsize=4)
def _ledger_in(text: str) -> tuple[tuple[Certificate, ...], tuple[FailedCheck, ...]]:
    data = json.loads(text)
    failed = [FailedCheck(CheckedKernel(**e["checked"]), str(e["date"]), str(e["reason"])) for e in data[_FAILED]]
    return tuple(map(Certificate.from_dict, data[_PASSED])), tuple(failed)


def record(passed: Iterable[Certificate], failed: Mapping[CheckedKernel, str]) -> None:
    """Write to the file what ``passed``, and what ``failed`` with the reasons; each takes an earlier result back.

    Of one kernel, dtype and hardware only the newest certificate is kept: what was certified under other versions is
    replaced. The file appears whole: who reads it meanwhile has the old one.
    """
    news = {_place(each.checked): each for each in passed}
    newly_failed = {checked: FailedCheck(checked, _today(), _short(reason)) for checked, reason in failed.items()}
    known = read_ledger()
    kept = [each for each in known[0] if each.checked not in failed and _place(each.checked) not in news]
    gone = {each.checked for each in news.values()}
    failures = {each.checked: each for each in known[1] if each.checked not in gone} | newly_failed
    now = (*kept, *news.values()), tuple(failures.values())
    if now != known:
        _write_whole(store(), {_PASSED: [asdict(each) for each in now[0]], _FAILED: [asdict(each) for each in now[1]]})


def read_certificates(path: Path) -> tuple[Certificate, ...]:
    """What a plugin ships in the file; nothing if there is none, or if it is damaged, which is a warning."""
    try:
        return tuple(map(Certificate.from_dict, json.loads(path.read_text(encoding="utf-8"))))
    except (FileNotFoundError, NotADirectoryError):
        return ()
    except _DAMAGE as error:
        _warn_of_damage(path, error)
        return ()


def write_certificates(path: Path, certificates: Iterable[Certificate]) -> None:
    """Write a file of certificates that a plugin can ship.

    Raises:
        HostError: it can't be written.
    """
    try:
        path.write_text(json.dumps([asdict(each) for each in certificates], indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise HostError(f"{path} can't be written: {error}") from error


def _write_whole(path: Path, data: object) -> None:
    """Write ``data`` to ``path`` as JSON, so that the file appears whole. That it can't be written is a warning."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            written.write_text(json.dumps(data, indent=1), encoding="utf-8")
            written.replace(path)
        finally:
            written.unlink(missing_ok=True)
    except OSError as error:
        _warn_once(
            path,
            f"can't be written ({error}), so plans will not know what was verified. Set VEOMNI_CACHE to a folder that "
            "can be written",
        )


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def _short(reason: str) -> str:
    words = " ".join(reason.split())
    return words if len(words) <= _LONGEST_REASON else f"{words[:_LONGEST_REASON]}…"


def _place(checked: CheckedKernel) -> tuple[str, ...]:
    return checked.kernel, checked.distribution, checked.dtype, checked.hardware


def _warn_of_damage(path: Path, error: Exception) -> None:
    _warn_once(path, f"can't be read ({error}), so nothing in it counts: no pass and no failure. Remove the file")


def _warn_once(path: Path, problem: str) -> None:
    if path not in _warned:
        _warned.add(path)
        logger.warning("%s %s", path, problem)


def _shipped_file(plugin: PluginRecord) -> Path | None:
    """The certificates in the plugin's package. Nothing of it is imported."""
    try:
        spec = importlib.util.find_spec(plugin.module.partition(".")[0])
    except (ImportError, ValueError):
        return None
    folders = (spec.submodule_search_locations or ()) if spec else ()
    return next((file for folder in folders if (file := Path(folder, CERTIFICATES)).is_file()), None)
