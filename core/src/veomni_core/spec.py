"""What plugins hand to the core: descriptions of kernels, ops, devices and site rules. Imports no torch."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from veomni_core.errors import KernelLoadError, SpecError, did_you_mean
from veomni_core.field_types import (
    names_in,
    require_boolean,
    require_instance,
    require_integer,
    require_mapping,
    require_name,
    require_reference,
    require_text,
)
from veomni_core.hardware import Hardware, HardwareRequirement
from veomni_core.random_states import random_states_kept

EAGER = "eager"
DTYPES = ("float32", "bfloat16", "float16")


def load_attribute(reference: str) -> Any:
    """Import ``"module:attribute"`` (the attribute may be dotted) and return it."""
    module_name, _, attribute = reference.partition(":")
    value: Any = importlib.import_module(module_name)
    for name in attribute.split("."):
        value = getattr(value, name)
    return value


@dataclass(frozen=True)
class KernelSpec:
    """One implementation of one variant of one op.

    ``factory`` names (``"module:attribute"``) the kernel itself, or a function without parameters that returns it; it
    is imported only when the kernel is bound. ``preference`` ranks kernels for ``auto``: the highest that can run
    wins, and one at 0 or below is never chosen without being named. ``dtypes`` are the input types it accepts,
    ``deterministic`` promises the same bits on every run, ``backward`` that every gradient of the contract is given.
    ``features`` are the optional parts of the contract that it computes (of attention: see
    :mod:`veomni_core.ops.attention`); it must raise when asked for one that it doesn't declare.
    """

    name: str
    op_name: str
    variant: str
    factory: str
    hardware: HardwareRequirement = field(default_factory=HardwareRequirement)
    description: str = ""
    preference: int = 50
    deterministic: bool = True
    backward: bool = True
    dtypes: tuple[str, ...] = DTYPES
    expert_parallel: bool = False
    features: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("name", "op_name", "variant"):
            require_name(f"KernelSpec {self.name!r}", name, getattr(self, name))
        owner = f"KernelSpec {self}"
        if self.name in (EAGER, "auto"):
            raise SpecError(f"{owner}: {self.name!r} is a word of the config and cannot name a kernel")
        require_reference(owner, "factory", self.factory)
        require_instance(owner, "hardware", self.hardware, HardwareRequirement)
        require_text(owner, "description", self.description)
        require_integer(owner, "preference", self.preference)
        for name in ("deterministic", "backward", "expert_parallel"):
            require_boolean(owner, name, getattr(self, name))
        for name in ("dtypes", "features"):
            object.__setattr__(self, name, names_in(owner, name, getattr(self, name)))
        if not self.dtypes:
            raise SpecError(f"{owner}: dtypes is empty, so nothing could ever be computed")
        for dtype in self.dtypes:
            if dtype not in DTYPES:
                raise SpecError(f"{owner}: dtypes holds {dtype!r}, which no op is given. {did_you_mean(dtype, DTYPES)}")

    def __str__(self) -> str:
        return f"{self.op_name}/{self.variant}:{self.name}"

    @property
    def key(self) -> tuple[str, str, str]:
        """What identifies the kernel among all plugins: op, variant and name."""
        return (self.op_name, self.variant, self.name)

    def load(self) -> Callable[..., Any]:
        """Import the factory and return the kernel, ready to be called as the op's contract says.

        Random states stay as they are: libraries draw and seed when they are imported, and a job that is bound must
        draw what it would have drawn unbound.

        Raises:
            KernelLoadError: the import failed, or what it gave cannot be called.
        """
        try:
            with random_states_kept():
                kernel = load_attribute(self.factory)
                if callable(kernel) and _is_zero_argument(kernel):
                    kernel = kernel()
        except Exception as error:
            raise KernelLoadError(f"{self}: {self.factory} failed: {type(error).__name__}: {error}") from error
        if not callable(kernel):
            raise KernelLoadError(f"{self}: {self.factory} gave a {type(kernel).__name__}, which cannot be called")
        return kernel  # type: ignore[no-any-return]


def _is_zero_argument(function: Callable[..., Any]) -> bool:
    try:
        return not inspect.signature(function).parameters
    except (TypeError, ValueError):  # builtins such as autograd.Function.apply have no signature: they are kernels
        return False


@dataclass(frozen=True)
class OpSpec:
    """A replaceable computation.

    ``variants`` are its exact mathematics; ``contract`` names (``"module:attribute"``) a mapping from variant to
    :class:`veomni_core.ops.contract.Contract`, imported only when a kernel is checked or a site is proven.
    ``config_field`` is its key in the job's YAML and ``default`` that key's value under ``preset: gpu``.
    ``published`` maps values that are known to exist to the distribution that brings them, so that a kernel that is
    not installed is told apart from one that is misspelt. ``legacy_values`` maps retired spellings to present ones.
    ``follows_autocast`` is whether under ``torch.autocast`` it computes in autocast's dtype, whatever its weights': it
    multiplies matrices, or all that it gets comes from products.
    """

    name: str
    variants: tuple[str, ...]
    config_field: str
    default: str = EAGER
    contract: str = ""
    description: str = ""
    variant_aliases: Mapping[str, str] = field(default_factory=dict, hash=False)
    published: Mapping[str, str] = field(default_factory=dict, hash=False)
    legacy_values: Mapping[str, str] = field(default_factory=dict, hash=False)
    follows_autocast: bool = False

    def __post_init__(self) -> None:
        owner = f"OpSpec {self.name!r}"
        for name in ("name", "config_field", "default"):
            require_name(owner, name, getattr(self, name))
        require_text(owner, "description", self.description)
        require_reference(owner, "contract", self.contract)
        require_boolean(owner, "follows_autocast", self.follows_autocast)
        object.__setattr__(self, "variants", names_in(owner, "variants", self.variants))
        if not self.variants:
            raise SpecError(f"{owner}: variants is empty, and an op needs at least one")
        for name in ("variant_aliases", "published", "legacy_values"):
            require_mapping(owner, name, getattr(self, name), str)
        for alias, variant in self.variant_aliases.items():
            if variant not in self.variants:
                raise SpecError(
                    f"{owner}: variant_aliases[{alias!r}] is {variant!r}, which is no variant. "
                    f"{did_you_mean(variant, self.variants)}"
                )

    def canonical_variant(self, variant: str) -> str:
        """``variant``, or the variant that it is an alias of."""
        return self.variant_aliases.get(variant, variant)


@dataclass(frozen=True)
class DeviceSpec:
    """A device type that the core does not know: how to see it, products that can be named, and its preset.

    ``detect`` names (``"module:attribute"``) a function without parameters that returns a
    :class:`~veomni_core.hardware.Hardware`, or ``None`` where there is no such device. ``preset`` maps config fields
    to the values that ``preset: <device_type>`` fills in; other fields are then eager. Without it there is no such
    preset.
    """

    device_type: str
    detect: str
    named: Mapping[str, Hardware] = field(default_factory=dict, hash=False)
    preset: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        owner = f"DeviceSpec {self.device_type!r}"
        require_name(owner, "device_type", self.device_type)
        require_reference(owner, "detect", self.detect)
        require_mapping(owner, "named", self.named, Hardware)
        require_mapping(owner, "preset", self.preset, str)


@dataclass(frozen=True)
class SiteRule:
    """How to find an op in models, and how to put a kernel there.

    ``locator`` names (``"module:attribute"``) a class without constructor parameters that has the two methods of
    :class:`veomni_core.sites.site.SiteLocator`. ``order`` says whose changes are applied first (low first) where two
    rules change one module. ``installs_eager`` marks an op whose eager code must itself be selected. A rule that looks
    at no parameter then, as it says by ``reads_parameters=False``, is run even where FSDP1 has flattened them.
    """

    name: str
    locator: str
    order: int = 50
    installs_eager: bool = False
    reads_parameters: bool = True

    def __post_init__(self) -> None:
        owner = f"SiteRule {self.name!r}"
        require_name(owner, "name", self.name)
        require_reference(owner, "locator", self.locator)
        require_integer(owner, "order", self.order)
        require_boolean(owner, "installs_eager", self.installs_eager)
        require_boolean(owner, "reads_parameters", self.reads_parameters)


@dataclass(frozen=True)
class JobConditions:
    """What a job's other sections say that its plan depends on.

    ``device`` is where it runs, as torch names devices; the machine's accelerator where it is ``None``. ``autocast`` is
    the dtype of the autocast that it trains under, ``None`` for none.
    """

    device: str | None = None
    autocast: str | None = None


@dataclass(frozen=True)
class CommandSpec:
    """A verb that a plugin adds to the ``veomni`` command line.

    ``target`` names (``"module:attribute"``) a function that typer can turn into a command; it is imported only when
    the verb is used. ``job_check`` is for a verb that runs jobs: it names a function that takes a job file's path and
    raises what the verb would raise for what the file says. ``veomni plan`` calls it for jobs that have other sections
    than ``model``, so that it accepts no job that the verb refuses. It may return :class:`JobConditions`, under which
    the verb would plan.
    """

    name: str
    target: str
    help: str = ""
    job_check: str = ""

    def __post_init__(self) -> None:
        owner = f"CommandSpec {self.name!r}"
        require_name(owner, "name", self.name)
        require_reference(owner, "target", self.target)
        require_text(owner, "help", self.help)
        if self.job_check != "":
            require_reference(owner, "job_check", self.job_check)
