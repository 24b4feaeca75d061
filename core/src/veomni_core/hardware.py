"""What hardware is here (or will be), and what a kernel needs of it."""

from __future__ import annotations

import functools
import importlib.metadata
import re
from collections.abc import Mapping
from dataclasses import dataclass

from packaging.requirements import InvalidRequirement, Requirement

from veomni_core.errors import SpecError, UnknownNameError, did_you_mean
from veomni_core.field_types import names_in, require_boolean, require_integer, require_name, require_text

ANY_DEVICE = "any"
_DEVICE_ALIASES = {"gpu": "cuda"}
_SM_NAME = re.compile(r"sm_?(\d{2,3})")


def canonical_device(device_type: str) -> str:
    """``gpu`` and ``cuda`` are one device type; everything else is itself."""
    return _DEVICE_ALIASES.get(device_type, device_type)


def torch_device_type(device_type: str) -> str:
    """The type of a ``torch.device`` on such hardware."""
    return "cuda" if device_type == "rocm" else device_type


@dataclass(frozen=True)
class Hardware:
    """One kind of accelerator that a job runs on.

    ``compute_capability`` is NVIDIA's, times ten (9.0 is ``90``); ``None`` where the vendor has no such number.
    ``detected`` is true for hardware that was seen on this machine: only then can packages be checked too.
    """

    device_type: str
    compute_capability: int | None = None
    name: str = ""
    count: int = 1
    detected: bool = False

    def __post_init__(self) -> None:
        require_name("Hardware", "device_type", self.device_type)
        require_integer("Hardware", "compute_capability", self.compute_capability, optional=True)
        require_text("Hardware", "name", self.name)
        require_integer("Hardware", "count", self.count)
        require_boolean("Hardware", "detected", self.detected)
        object.__setattr__(self, "device_type", canonical_device(self.device_type))

    @classmethod
    def named(cls, name: str, extra: Mapping[str, Hardware] | None = None) -> Hardware:
        """The hardware known by ``name``: a product (``h200``), ``sm75`` or a plugin's own (``extra``)."""
        known = {**NAMED, **(extra or {})}
        key = name.strip().lower()
        if key in known:
            return known[key]
        if match := _SM_NAME.fullmatch(key):
            return cls("cuda", int(match[1]), name=key)
        raise UnknownNameError(f"hardware {name!r} is not known. {did_you_mean(key, [*known, 'sm90'])}")

    @classmethod
    def detect(cls) -> Hardware:
        """The accelerator that torch sees on this machine, or its CPU. Imports torch."""
        import torch

        if torch.cuda.is_available():
            count = torch.cuda.device_count()
            name = torch.cuda.get_device_name(0)
            if torch.version.hip:
                return cls("rocm", None, name=name, count=count, detected=True)
            major, minor = torch.cuda.get_device_capability(0)
            return cls("cuda", major * 10 + minor, name=name, count=count, detected=True)
        return cls.cpu()

    @classmethod
    def cpu(cls) -> Hardware:
        """The CPU of this machine."""
        return cls("cpu", None, name="CPU", detected=True)

    @property
    def torch_device_type(self) -> str:
        """What torch calls devices of this type: AMD's GPUs are ``cuda`` to it."""
        return torch_device_type(self.device_type)

    def describe(self) -> str:
        """For messages: ``cuda 9.0 (NVIDIA H200)``."""
        capability = "" if self.compute_capability is None else f" {show_capability(self.compute_capability)}"
        return f"{self.device_type}{capability}" + (f" ({self.name})" if self.name else "")


NAMED: Mapping[str, Hardware] = {
    "cpu": Hardware("cpu", name="cpu"),
    "v100": Hardware("cuda", 70, name="NVIDIA V100"),
    "t4": Hardware("cuda", 75, name="NVIDIA T4"),
    "a100": Hardware("cuda", 80, name="NVIDIA A100"),
    "l40s": Hardware("cuda", 89, name="NVIDIA L40S"),
    "h100": Hardware("cuda", 90, name="NVIDIA H100"),
    "h200": Hardware("cuda", 90, name="NVIDIA H200"),
    "b200": Hardware("cuda", 100, name="NVIDIA B200"),
    "mi300x": Hardware("rocm", name="AMD Instinct MI300X"),
}


def show_capability(capability: int) -> str:
    """``90`` as NVIDIA writes it: ``9.0``."""
    return f"{capability // 10}.{capability % 10}"


@dataclass(frozen=True)
class HardwareRequirement:
    """What a kernel needs; every field narrows it.

    ``packages`` are PEP 508 requirements (``"quack-kernels>=0.4"``) of the libraries that the kernel calls.
    """

    device_type: str = ANY_DEVICE
    min_compute_capability: int | None = None
    max_compute_capability: int | None = None
    packages: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        owner = "HardwareRequirement"
        require_name(owner, "device_type", self.device_type)
        require_integer(owner, "min_compute_capability", self.min_compute_capability, optional=True)
        require_integer(owner, "max_compute_capability", self.max_compute_capability, optional=True)
        object.__setattr__(self, "device_type", canonical_device(self.device_type))
        object.__setattr__(self, "packages", names_in(owner, "packages", self.packages))
        low, high = self.min_compute_capability, self.max_compute_capability
        if low is not None and high is not None and low > high:
            raise SpecError(f"HardwareRequirement: min_compute_capability {low} is above max_compute_capability {high}")
        for package in self.packages:
            try:
                Requirement(package)
            except InvalidRequirement as error:
                raise SpecError(f"HardwareRequirement: {package!r} is not a package requirement: {error}") from None

    def unmet(self, hardware: Hardware) -> tuple[str, ...]:
        """Why ``hardware`` does not do, one sentence each; empty when it does."""
        reasons = self._unmet_by_device(hardware)
        if hardware.detected:
            reasons += tuple(reason for package in self.packages if (reason := _package_unmet(package)))
        return reasons

    def _unmet_by_device(self, hardware: Hardware) -> tuple[str, ...]:
        if self.device_type == ANY_DEVICE:
            return ()
        if self.device_type != hardware.device_type:
            return (f"needs device type {self.device_type}, this is {hardware.describe()}",)
        reasons = []
        have, low, high = hardware.compute_capability, self.min_compute_capability, self.max_compute_capability
        if low is not None and (have is None or have < low):
            reasons.append(f"needs compute capability >= {show_capability(low)}, {_this_device(hardware)}")
        if high is not None and (have is None or have > high):
            reasons.append(f"needs compute capability <= {show_capability(high)}, {_this_device(hardware)}")
        return tuple(reasons)


def _this_device(hardware: Hardware) -> str:
    have = "of unknown capability" if hardware.compute_capability is None else None
    return f"this GPU is {have or show_capability(hardware.compute_capability or 0)} ({hardware.name or 'unnamed'})"


def _package_unmet(package: str) -> str | None:
    requirement = Requirement(package)
    version = _installed_version(requirement.name)
    if version is None:
        return f"needs {package}, which is not installed"
    if not requirement.specifier.contains(version, prereleases=True):
        return f"needs {package}, {version} is installed"
    return None


@functools.cache
def _installed_version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
