"""Which steps of which model were measured, and on which machine: what a profile is looked up by, and what it needs."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from veomni_conformance.this_machine import ThisMachine
from veomni_core.discovery.installed_plugins import definition_distributions

# Of a config, what says nothing about what a step computes. A plan has the dtypes of its sites.
_BOOKKEEPING = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache")
_PACKAGES = ("veomni-core", "torch", "triton", "transformers")  # the model's own code is of these
_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class MeasuredJob:
    """One model and the shape of its steps: with the kinds of its sites, all shapes follow from it.

    Attributes:
        model_type: for messages.
        model: a hash of the model's config.
        batch: the sequences of a step on one device, and their length.
        autocast: the dtype of ``torch.autocast``; ``None`` without it.
    """

    model_type: str
    model: str
    batch: tuple[int, int]
    autocast: str | None = None

    @classmethod
    def of(cls, model: Any, batch: tuple[int, int], autocast: str | None) -> MeasuredJob | None:
        """The steps of ``model``; ``None`` for a model without a config, whose shapes nothing states."""
        config: Any = getattr(model, "config", None)
        if not hasattr(config, "to_dict"):
            return None
        stated = {name: value for name, value in config.to_dict().items() if name not in _BOOKKEEPING}
        digest = hashlib.sha256(json.dumps(stated, sort_keys=True, default=str).encode()).hexdigest()
        return cls(str(config.model_type), digest, (int(batch[0]), int(batch[1])), autocast)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> MeasuredJob:
        """The job that :meth:`to_dict` turned into ``data``."""
        sequences, length = map(int, data["batch"])
        return cls(str(data["model_type"]), str(data["model"]), (sequences, length), data["autocast"])

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)

    @property
    def steps(self) -> str:
        """For messages: ``4 x 4096 tokens, autocast to bfloat16``."""
        autocast = f", autocast to {self.autocast}" if self.autocast else ""
        return f"{self.batch[0]} x {self.batch[1]} tokens{autocast}"

    def __str__(self) -> str:
        return f"{self.model_type}, {self.steps}"


@dataclass(frozen=True)
class MeasuredOn:
    """The machine, and what of its software every time depends on. What else a kernel's time depends on is its own.

    Attributes:
        hardware: as :meth:`~veomni_core.Hardware.describe` has it.
        processor: the CPU's model, where kernels run on the CPU; empty elsewhere.
        driver: of CUDA and of the GPU.
        packages: names and versions.
    """

    hardware: str
    processor: str
    driver: str
    packages: tuple[str, ...]

    @classmethod
    def here(cls, machine: ThisMachine) -> MeasuredOn:
        """This machine, as it is now."""
        processor = _processor() if machine.hardware.device_type == "cpu" else ""
        packages = machine.packages((*_PACKAGES, *definition_distributions()))
        return cls(machine.hardware.describe(), processor, machine.driver, packages)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> MeasuredOn:
        """The machine that :meth:`to_dict` turned into ``data``."""
        named = {name: str(data[name]) for name in ("hardware", "processor", "driver")}
        return cls(**named, packages=tuple(map(str, data["packages"])))

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)

    def differences(self, here: MeasuredOn) -> Iterator[str]:
        """What is otherwise ``here``, as phrases: ``triton 3.5.0 (here 3.6.0)``."""
        for name in ("hardware", "processor", "driver"):
            mine, other = getattr(self, name), getattr(here, name)
            if mine != other:
                yield f"{mine or f'no {name}'} (here {other or 'none'})"
        versions = dict(package.partition(" ")[::2] for package in here.packages)
        gone = sorted({*self.packages} - {*here.packages})
        for name, _, version in (package.partition(" ") for package in gone):
            yield f"{name} {version} (here {versions.get(name, 'none')})"
        named = {package.partition(" ")[0] for package in self.packages}
        yield from (f"{name} {version}, which was not there" for name, version in versions.items() if name not in named)


def _processor() -> str:
    """The CPU's model, from a file where there is one: no process is started."""
    try:
        lines = _CPUINFO.read_text("utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(filter(None, names), platform.processor() or platform.machine())
