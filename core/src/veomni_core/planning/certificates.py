"""Certificates: that a kernel passed its op's contract, where, and how close each case came to its tolerance.

``veomni verify`` keeps one for each kernel and dtype that passes, in the user's cache. A plugin may ship some in its
package, made on its author's machines. One counts as *here* if nothing that it depends on has changed since, and it is
this machine's own: what is shipped says what was seen elsewhere.
"""

from __future__ import annotations

import datetime
import importlib.util
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from veomni_core.descriptions.kernel_spec import KernelSpec
from veomni_core.discovery.registry import PluginRecord
from veomni_core.errors import HostError
from veomni_core.planning.failed_checks import cache_file, warn_once, write_whole
from veomni_core.planning.this_machine import CERTIFICATES, CheckedKernel, ThisMachine

HERE, NEVER = "certified here", "never verified here"
_ELSEWHERE = "verified elsewhere"
_MOST_NAMED = 2


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
        return cls(checked, datetime.datetime.now(datetime.UTC).date().isoformat(), dict(cases))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Certificate:
        """The certificate that :meth:`to_dict` turned into ``data``."""
        cases = {str(name): tuple(shares) for name, shares in data["cases"].items()}
        return cls(CheckedKernel(**data["checked"]), str(data["date"]), cases)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)


class Certificates:
    """What is certified here, and what plugins ship of other machines.

    Args:
        machine: this machine.
        kept: the certificates of the user's cache; read from it without them.
    """

    def __init__(self, machine: ThisMachine, kept: Iterable[Certificate] | None = None) -> None:
        self._machine = machine
        self._kept = {each.checked: each for each in (read_certificates(store()) if kept is None else kept)}
        self._shipped: dict[str, tuple[Certificate, ...]] = {}

    def is_here(self, spec: KernelSpec, plugin: PluginRecord, dtype: str) -> bool:
        """Whether ``spec`` of ``plugin`` passed in ``dtype`` on this machine, as everything is now."""
        return self._machine.checked(spec, plugin, dtype) in self._kept

    def standing(self, spec: KernelSpec, plugin: PluginRecord, dtypes: Iterable[str]) -> str:
        """How ``spec`` stands in ``dtypes``: :data:`HERE`, :data:`NEVER`, or verified elsewhere, and where.

        The worst dtype decides.
        """
        standings = [self._standing(spec, plugin, dtype) for dtype in dtypes]
        return max(standings, key=lambda each: (each == NEVER, each != HERE), default=NEVER)

    def standing_on_any_device(self, spec: KernelSpec, plugin: PluginRecord) -> str:
        """How ``spec`` stands, for who doesn't ask which device is here: detecting one may import torch.

        ``certified on`` the devices where it passed in all of its dtypes, with the files and packages that are here.
        """
        dtypes: dict[str, set[str]] = {}
        ours = [
            each.checked for each in self._kept.values() if self._machine.has_the_same_software(each.checked, plugin)
        ]
        for checked in ours:
            if (checked.kernel, checked.version) == (str(spec), plugin.version_of(spec)):
                dtypes.setdefault(checked.hardware, set()).add(checked.dtype)
        devices = [device for device, passed in dtypes.items() if {*spec.dtypes} <= passed]
        return f"certified on {', '.join(devices)}" if devices else self.standing(spec, plugin, spec.dtypes)

    def _standing(self, spec: KernelSpec, plugin: PluginRecord, dtype: str) -> str:
        here = self._machine.checked(spec, plugin, dtype)
        if here in self._kept:
            return HERE
        others = [
            each.checked
            for each in (*self._kept.values(), *self._shipped_by(plugin))
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


def store() -> Path:
    """The file of this machine's certificates, in the folder of the failed checks."""
    return cache_file().with_name("certificates.json")


def read_certificates(path: Path) -> tuple[Certificate, ...]:
    """What is in the file; nothing if there is none, or if it is damaged, which is a warning."""
    try:
        return tuple(Certificate.from_dict(entry) for entry in json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError):
        return ()
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        warn_once(path, f"can't be read ({error}), so nothing that it certifies counts. Remove the file")
        return ()


def keep(passed: Iterable[Certificate], failed: Iterable[CheckedKernel]) -> None:
    """Add what ``passed`` to this machine's certificates, and remove what ``failed``.

    Of one kernel, dtype and hardware only the newest is kept: what was certified under other versions is replaced.
    """
    known, news = read_certificates(store()), {_place(each.checked): each for each in passed}
    gone = {*failed}
    kept = [each for each in known if each.checked not in gone and _place(each.checked) not in news]
    if news or len(kept) != len(known):
        write_whole(store(), [each.to_dict() for each in (*kept, *news.values())])


def write_certificates(path: Path, certificates: Iterable[Certificate]) -> None:
    """Write a file of certificates that a plugin can ship.

    Raises:
        HostError: it can't be written.
    """
    try:
        path.write_text(json.dumps([each.to_dict() for each in certificates], indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise HostError(f"{path} can't be written: {error}") from error


def _place(checked: CheckedKernel) -> tuple[str, ...]:
    return checked.kernel, checked.distribution, checked.dtype, checked.hardware


def _shipped_file(plugin: PluginRecord) -> Path | None:
    """The certificates in the plugin's package. Nothing of it is imported."""
    try:
        spec = importlib.util.find_spec(plugin.module.partition(".")[0])
    except (ImportError, ValueError):
        return None
    folders = (spec.submodule_search_locations or ()) if spec else ()
    return next((file for folder in folders if (file := Path(folder, CERTIFICATES)).is_file()), None)
