"""What the result of a check depends on: the plugin's files, the contracts' release, packages, device, driver."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from veomni_conformance.installed_files import combined, hashed_files, modules_of
from veomni_core.descriptions.hardware import Hardware, requirement
from veomni_core.descriptions.kernel_spec import KernelSpec
from veomni_core.discovery.installed_plugins import identity
from veomni_core.discovery.registry import PluginRecord
from veomni_ops.torch_overrides import PYTHON_NATIVE, changed_overrides

CERTIFICATES = "veomni_certificates.json"  # of a plugin's package; no part of what was checked
# They matter to every kernel. A later release of the contracts may ask what no check has asked before.
_OF_EVERY_KERNEL = ("torch", "triton", PYTHON_NATIVE, "veomni-conformance", "veomni-ops")
_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class CheckedKernel:
    """What was checked, in which dtype, and where.

    Attributes:
        kernel: the kernel, as ``op/variant:name``.
        dtype: the dtype of the samples.
        distribution, version: the plugin that it came from.
        files: a hash of that distribution's files; empty if it is not installed as one.
        hardware: where it ran, as :meth:`~veomni_core.Hardware.describe` has it.
        packages: names and versions: of the compilers, of the contracts, and of what the kernel requires; and, as a
            package, which of torch's operators this process replaces.
        driver: the versions of CUDA, as torch was built for it, and of the driver; empty on a CPU.
    """

    kernel: str
    dtype: str
    distribution: str
    version: str
    files: str
    hardware: str
    packages: tuple[str, ...]
    driver: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "packages", tuple(self.packages))
        for field in fields(self):
            value = getattr(self, field.name)
            parts = value if isinstance(value, tuple) else (value,)
            if not all(isinstance(part, str) for part in parts):
                raise ValueError(f"{field.name} must be text, got {value!r}")

    def differences(self, here: CheckedKernel) -> Iterator[str]:
        """What is otherwise ``here``, as phrases: ``triton 3.5.0 (here 3.6.0)``."""
        if self.hardware != here.hardware:
            yield self.hardware
        if self.version != here.version:
            yield f"{self.distribution} {self.version} (here {here.version})"
        elif self.files != here.files:
            yield f"other files of {self.distribution} {self.version}"
        versions = dict(package.partition(" ")[::2] for package in here.packages)
        for package in sorted({*self.packages} - {*here.packages}):
            name, _, version = package.partition(" ")
            yield f"{name} {version} (here {versions.get(name, 'none')})"
        if self.hardware == here.hardware and self.driver != here.driver:
            yield f"{self.driver or 'no driver'} (here {here.driver or 'none'})"


class ThisMachine:
    """Says what a check of a kernel here would depend on. Hashes and versions are read once.

    Args:
        hardware: the hardware of this machine that kernels run on.

    Attributes:
        driver: the versions of CUDA and of the driver; empty on a CPU.
    """

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        self.driver = _driver() if hardware.device_type == "cuda" else ""
        self._files: dict[tuple[str, str], str] = {}
        self._versions: dict[str, str] = {}

    def checked(self, spec: KernelSpec, plugin: PluginRecord, dtype: str) -> CheckedKernel:
        """``spec`` of ``plugin`` in ``dtype``, as it is here now."""
        required = (requirement(each).name for each in spec.hardware.chosen_for(self.hardware).packages)
        return CheckedKernel(
            kernel=str(spec),
            dtype=dtype,
            distribution=plugin.distribution,
            version=plugin.version_of(spec),
            files=self._hash(plugin),
            hardware=self.hardware.describe(),
            packages=self.packages((*_OF_EVERY_KERNEL, *required)),
            driver=self.driver,
        )

    def packages(self, names: Iterable[str]) -> tuple[str, ...]:
        """Those of ``names`` that are installed, sorted, each with its version."""
        return tuple(f"{name} {version}" for name in sorted({*names}) if (version := self._version(name)))

    def has_the_same_software(self, checked: CheckedKernel, plugin: PluginRecord) -> bool:
        """Whether ``checked`` depended on the files of ``plugin`` and on the packages that are here."""
        same = (checked.distribution, checked.files) == (plugin.distribution, self._hash(plugin))
        return same and all(
            f"{(name := each.partition(' ')[0])} {self._version(name)}" == each for each in checked.packages
        )

    def _hash(self, plugin: PluginRecord) -> str:
        key = (plugin.distribution, plugin.name)
        if key not in self._files:
            try:
                found = hashed_files(importlib.metadata.distribution(plugin.distribution), modules_of(plugin))
                code = {path: each for path, each in found.items() if not path.endswith(CERTIFICATES)}
                self._files[key] = combined(code)
            except importlib.metadata.PackageNotFoundError:
                self._files[key] = ""
        return self._files[key]

    def _version(self, distribution: str) -> str:
        if distribution == PYTHON_NATIVE:
            return changed_overrides()
        if distribution not in self._versions:
            self._versions[distribution] = installed_version(distribution)
        return self._versions[distribution]


def installed_version(distribution: str) -> str:
    """The version of the distribution, as discovery reads it; empty if it is not installed."""
    try:
        return identity(importlib.metadata.distribution(distribution))[1]
    except importlib.metadata.PackageNotFoundError:
        return ""


def _driver() -> str:
    """The versions of CUDA and of NVIDIA's driver, from files: neither torch nor a library of CUDA is imported."""
    return ", ".join(filter(None, (_cuda_of_torch(), _nvidia_driver())))


def _cuda_of_torch() -> str:
    try:
        text = Path(str(importlib.metadata.distribution("torch").locate_file("torch/version.py"))).read_text("utf-8")
    except (importlib.metadata.PackageNotFoundError, OSError):
        return ""
    found = re.search(r"^cuda\b.*= '([\d.]+)'", text, re.MULTILINE)
    return f"CUDA {found[1]}" if found else ""


def _nvidia_driver() -> str:
    try:
        found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", _DRIVER.read_text("utf-8"))
    except OSError:
        return ""
    return f"driver {found[0]}" if found else ""
