"""The hardware that a job runs on, and what a kernel requires of it."""

from __future__ import annotations

import functools
import importlib.metadata
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement

from veomni_core.descriptions.field_types import check_fields, from_data
from veomni_core.errors import SpecError, UnknownNameError, did_you_mean

ANY_DEVICE = "any"
_SM_NAME = re.compile(r"sm_?(\d{2,3})")


def canonical_device(device_type: str) -> str:
    """``cuda`` for ``gpu``; every other device type unchanged."""
    return "cuda" if device_type == "gpu" else device_type


def torch_device_type(device_type: str) -> str:
    """The type that ``torch.device`` uses for ``device_type``: AMD's GPUs (``rocm``) are ``cuda`` to torch."""
    return "cuda" if device_type == "rocm" else device_type


@dataclass(frozen=True)
class Hardware:
    """The kind of device that a job runs on.

    Args:
        device_type: ``cuda`` (or ``gpu``), ``rocm``, ``cpu``, or a plugin's own.
        compute_capability: NVIDIA's compute capability times ten (``90`` for 9.0); ``None`` for other vendors.
        name: the product, for messages.
        count: how many such devices the machine has.
        detected: whether the hardware was found on this machine. Only then can installed packages be checked.

    Example:
        >>> Hardware.named("h200").describe()
        'cuda 9.0 (NVIDIA H200)'
    """

    device_type: str
    compute_capability: int | None = None
    name: str = ""
    count: int = 1
    detected: bool = False

    def __post_init__(self) -> None:
        check_fields(self, "Hardware", names=("device_type",))
        object.__setattr__(self, "device_type", canonical_device(self.device_type))

    @classmethod
    def named(cls, name: str, extra: Mapping[str, Hardware] | None = None) -> Hardware:
        """The hardware called ``name``: a product (``h200``), an SM version (``sm75``), or a name in ``extra``."""
        known = {**NAMED, **(extra or {})}
        key = name.strip().lower()
        if key in known:
            return known[key]
        if match := _SM_NAME.fullmatch(key):
            return cls("cuda", int(match[1]), name=key)
        raise UnknownNameError(f"hardware {name!r} is not known. {did_you_mean(key, [*known, 'sm90'])}")

    @classmethod
    def detect(cls) -> Hardware:
        """The first accelerator that torch sees on this machine, or else the CPU. Imports torch."""
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
        """The type that ``torch.device`` uses for this hardware."""
        return torch_device_type(self.device_type)

    def describe(self) -> str:
        """For messages: ``cuda 9.0 (NVIDIA H200)``."""
        capability = "" if self.compute_capability is None else f" {show_capability(self.compute_capability)}"
        return f"{self.device_type}{capability}" + (f" ({self.name})" if self.name else "")


# Compute capabilities as in NVIDIA's table of CUDA GPUs.
NAMED: Mapping[str, Hardware] = {
    "cpu": Hardware("cpu", name="cpu"),
    "v100": Hardware("cuda", 70, name="NVIDIA V100"),
    "t4": Hardware("cuda", 75, name="NVIDIA T4"),
    "a100": Hardware("cuda", 80, name="NVIDIA A100"),
    "a10g": Hardware("cuda", 86, name="NVIDIA A10G"),
    "l4": Hardware("cuda", 89, name="NVIDIA L4"),
    "l40s": Hardware("cuda", 89, name="NVIDIA L40S"),
    "rtx4090": Hardware("cuda", 89, name="NVIDIA GeForce RTX 4090"),
    "h100": Hardware("cuda", 90, name="NVIDIA H100"),
    "h200": Hardware("cuda", 90, name="NVIDIA H200"),
    "b200": Hardware("cuda", 100, name="NVIDIA B200"),
    "gb200": Hardware("cuda", 100, name="NVIDIA GB200"),
    "b300": Hardware("cuda", 103, name="NVIDIA B300"),
    "rtx5090": Hardware("cuda", 120, name="NVIDIA GeForce RTX 5090"),
    "mi300x": Hardware("rocm", name="AMD Instinct MI300X"),
    "mi355x": Hardware("rocm", name="AMD Instinct MI355X"),
    "mps": Hardware("mps", name="Apple silicon"),
}


def show_capability(capability: int) -> str:
    """A compute capability as NVIDIA writes it: ``9.0`` for ``90``."""
    return f"{capability // 10}.{capability % 10}"


@dataclass(frozen=True)
class HardwareRequirement:
    """What a kernel requires of the machine. All given fields must be met.

    Two requirements joined by ``|`` are met where either is: one spec for several device types.

    Args:
        device_type: ``any``, ``cuda``, ``rocm``, ``cpu``, or a plugin's own.
        min_compute_capability: the lowest that works, times ten (``90`` for 9.0), inclusive.
        max_compute_capability: the highest that works, inclusive.
        packages: PEP 508 requirements of the libraries that the kernel calls, as ``"quack-kernels>=0.4"``.
        others: the alternatives to all of the above, as ``|`` puts them together.

    Example:
        >>> HardwareRequirement("cuda", min_compute_capability=90).unmet(Hardware.named("a100"))
        ('needs compute capability >= 9.0, this GPU is 8.0 (NVIDIA A100)',)
        >>> (HardwareRequirement("cuda") | HardwareRequirement("rocm")).unmet(Hardware.named("mi300x"))
        ()
    """

    device_type: str = ANY_DEVICE
    min_compute_capability: int | None = None
    max_compute_capability: int | None = None
    packages: tuple[str, ...] = ()
    others: tuple[HardwareRequirement, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, "HardwareRequirement", names=("device_type",))
        object.__setattr__(self, "device_type", canonical_device(self.device_type))
        low, high = self.min_compute_capability, self.max_compute_capability
        for given in (low, high):
            if given is not None and not 20 <= given <= 200:
                raise SpecError(f"HardwareRequirement: a compute capability of 9.0 is written as 90; got {given}")
        if low is not None and high is not None and low > high:
            raise SpecError(f"HardwareRequirement: min_compute_capability {low} is above max_compute_capability {high}")
        for package in self.packages:
            try:
                requirement(package)
            except InvalidRequirement as error:
                raise SpecError(f"HardwareRequirement: {package!r} is not a package requirement: {error}") from None

    def __or__(self, other: HardwareRequirement) -> HardwareRequirement:
        return replace(self, others=(*self.others, replace(other, others=()), *other.others))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> HardwareRequirement:
        """The requirement that ``dataclasses.asdict`` turned into ``data``; raises SpecError if it is none."""
        return from_data(cls, data)

    def unmet(self, hardware: Hardware) -> tuple[str, ...]:
        """The requirements that ``hardware`` does not meet, one sentence each; empty if it meets all.

        Of alternatives, those for the hardware's own device type are told about, if there are any.
        """
        alternatives = (replace(self, others=()), *self.others)
        reasons = {each: each._unmet_alone(hardware) for each in alternatives}
        if not all(reasons.values()):
            return ()
        near = [each for each in alternatives if each.device_type in (ANY_DEVICE, hardware.device_type)]
        if near:
            each_way = dict.fromkeys(" and ".join(reasons[each]) for each in near)
            return reasons[near[0]] if len(each_way) == 1 else (", or ".join(each_way),)
        types = " or ".join(dict.fromkeys(each.device_type for each in alternatives))
        packages = reasons[alternatives[0]][1:] if len(alternatives) == 1 else ()
        return (f"needs device type {types}, this is {hardware.describe()}", *packages)

    def is_for(self, hardware: Hardware) -> bool:
        """Whether it is about devices of the type of ``hardware``, whatever else it needs of them."""
        return any(each.device_type in (ANY_DEVICE, hardware.device_type) for each in (self, *self.others))

    def chosen_for(self, hardware: Hardware) -> HardwareRequirement:
        """The alternative that ``hardware`` meets; the first if it meets none."""
        alternatives = (replace(self, others=()), *self.others)
        return next((each for each in alternatives if not each._unmet_alone(hardware)), alternatives[0])

    def _unmet_alone(self, hardware: Hardware) -> tuple[str, ...]:
        reasons = self._unmet_by_device(hardware)
        if hardware.detected:
            reasons += tuple(reason for package in self.packages if (reason := _package_unmet(package)))
        return reasons

    def _unmet_by_device(self, hardware: Hardware) -> tuple[str, ...]:
        if self.device_type == ANY_DEVICE:
            return ()
        if self.device_type != hardware.device_type:
            return (f"needs device type {self.device_type}, this is {hardware.describe()}",)
        have, low, high = hardware.compute_capability, self.min_compute_capability, self.max_compute_capability
        limits = [(">=", low)] if low is not None and (have is None or have < low) else []
        limits += [("<=", high)] if high is not None and (have is None or have > high) else []
        shown = "of unknown capability" if have is None else show_capability(have)
        here = f"this GPU is {shown} ({hardware.name or 'unnamed'})"
        return tuple(f"needs compute capability {sign} {show_capability(limit)}, {here}" for sign, limit in limits)


def _package_unmet(package: str) -> str | None:
    needed = requirement(package)
    version = _installed_version(needed.name)
    if version is None:
        return f"needs {package}, which is not installed"
    if not needed.specifier.contains(version, prereleases=True):
        return f"needs {package}, {version} is installed"
    return None


@functools.cache
def requirement(package: str) -> Requirement:
    """``package`` as it is read from a kernel's description; kernels of a plugin have the same ones.

    Raises:
        InvalidRequirement: it is none.
    """
    return Requirement(package)


@functools.cache
def _installed_version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
