"""What plugins hand to the core: specs of kernels, ops, devices, site rules and commands. Does not import torch."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from veomni_core.descriptions.field_types import (
    names_in,
    require_boolean,
    require_instance,
    require_integer,
    require_mapping,
    require_name,
    require_reference,
    require_text,
)
from veomni_core.descriptions.hardware import Hardware, HardwareRequirement
from veomni_core.errors import KernelLoadError, SpecError, did_you_mean
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

    Args:
        name: the kernel's name in configs.
        op_name: the op that it computes.
        variant: the op's variant, or an alias of it.
        factory: ``"module:attribute"`` of the kernel itself, or of a function without parameters that returns it.
            Imported only when the kernel is bound.
        hardware: what it requires of the machine.
        description: one line for ``veomni list``.
        preference: its rank for ``auto``, which takes the usable kernel with the highest rank. At 0 or below, ``auto``
            never takes it.
        deterministic: promises the same bits on every run.
        backward: promises every gradient of the contract.
        dtypes: the input dtypes that it accepts.
        expert_parallel: whether it also runs with experts that are sharded over ranks. Nothing reads this yet.
        features: the optional parts of the contract that it computes (for attention, see
            :mod:`veomni_core.ops.attention`). It must raise when a call needs one that it doesn't declare.
        can_run: ``"module:function"`` of a function from a :class:`~veomni_core.Site` to the reason why the kernel
            can't run there, or an empty string. It is asked when a plan is made, once for sites that agree in variant,
            dtype, features and ``sizes``, and may look at nothing else. Its module must not import torch.
        mask: for an attention kernel that takes masks of its own kind: ``"module:function"`` of the function that
            builds them, with the call signature of ``transformers.masking_utils.sdpa_mask``.

    Example:
        >>> str(KernelSpec("acme", "rms_norm", "standard", factory="acme_norm.rms_norm:rms_norm"))
        'rms_norm/standard:acme'
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
    can_run: str = ""
    mask: str = ""

    def __post_init__(self) -> None:
        for name in ("name", "op_name", "variant"):
            require_name(f"KernelSpec {self.name!r}", name, getattr(self, name))
        owner = f"KernelSpec {self}"
        if self.name in (EAGER, "auto"):
            raise SpecError(f"{owner}: {self.name!r} is reserved in configs; give the kernel another name")
        require_reference(owner, "factory", self.factory)
        for name in ("can_run", "mask"):
            if getattr(self, name):
                require_reference(owner, name, getattr(self, name))
        require_instance(owner, "hardware", self.hardware, HardwareRequirement)
        require_text(owner, "description", self.description)
        require_integer(owner, "preference", self.preference)
        for name in ("deterministic", "backward", "expert_parallel"):
            require_boolean(owner, name, getattr(self, name))
        for name in ("dtypes", "features"):
            object.__setattr__(self, name, names_in(owner, name, getattr(self, name)))
        if not self.dtypes:
            raise SpecError(f"{owner}: dtypes is empty; list at least one of {', '.join(DTYPES)}")
        for dtype in self.dtypes:
            if dtype not in DTYPES:
                raise SpecError(f"{owner}: dtypes holds {dtype!r}, which no op takes. {did_you_mean(dtype, DTYPES)}")

    def __str__(self) -> str:
        return f"{self.op_name}/{self.variant}:{self.name}"

    @property
    def key(self) -> tuple[str, str, str]:
        """What identifies the kernel among all plugins: op, variant and name."""
        return (self.op_name, self.variant, self.name)

    def load(self) -> Callable[..., Any]:
        """Import the factory and return the kernel, which has the call signature of the op's contract.

        Random states are restored afterwards. Some libraries draw or seed when they are imported, and a bound job must
        draw the same random numbers as an unbound one.

        Raises:
            KernelLoadError: the import or the factory failed, or what it returned is not callable.
        """
        return self._imported(self.factory, _made_by_factory)

    def load_mask(self) -> Callable[..., Any] | None:
        """Import the function that builds the kernel's masks; ``None`` if the spec names none.

        Raises:
            KernelLoadError: the import failed, or what it gave is not callable.
        """
        if not self.mask:
            return None
        return self._imported(self.mask)

    def _imported(self, reference: str, made: Callable[[Any], Any] = lambda value: value) -> Callable[..., Any]:
        try:
            with random_states_kept():
                function = made(load_attribute(reference))
        except Exception as error:
            raise KernelLoadError(f"{self}: {reference} failed: {type(error).__name__}: {error}") from error
        if not callable(function):
            raise KernelLoadError(f"{self}: {reference} gave a {type(function).__name__}, which cannot be called")
        return function


def _made_by_factory(value: Any) -> Any:
    """What ``value`` returns if it is a function without parameters, or else ``value``: the kernel itself."""
    return value() if callable(value) and _is_zero_argument(value) else value


def _is_zero_argument(function: Callable[..., Any]) -> bool:
    try:
        return not inspect.signature(function).parameters
    except (TypeError, ValueError):  # builtins such as autograd.Function.apply have no signature: they are kernels
        return False


@dataclass(frozen=True)
class DeviceSpec:
    """A device type that the core does not know.

    Args:
        device_type: its name, as torch calls it.
        detect: ``"module:attribute"`` of a function without parameters that returns a
            :class:`~veomni_core.descriptions.hardware.Hardware`, or ``None`` if this machine has no such device.
        named: products that can be named on the command line (``--hardware``), each with its hardware.
        preset: the values that ``preset: <device_type>`` fills in, by config field; other fields are then eager. If it
            is empty, there is no such preset.

    Example:
        >>> spec = DeviceSpec(
        ...     "xpu",
        ...     detect="acme_xpu.device:detect",
        ...     named={"max1550": Hardware("xpu", name="Intel Max 1550")},
        ...     preset={"rms_norm_implementation": "xpu"},
        ... )
        >>> spec.named["max1550"].describe()
        'xpu (Intel Max 1550)'
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

    Args:
        name: the rule's name, for messages.
        locator: ``"module:attribute"`` of a class without constructor parameters that has the two methods of
            :class:`veomni_core.sites.site.SiteLocator`, and with ``installs_eager`` also that of
            :class:`veomni_core.sites.site.EagerSiteLocator`.
        order: rules with a low order apply their changes first, which matters if two rules change one module.
        installs_eager: whether ``eager`` must be installed too, because the model may be set to something else.
        reads_parameters: whether the rule looks at parameters. A rule that doesn't also runs on models whose parameters
            FSDP1 has flattened.

    Example:
        >>> SiteRule("GELU modules", "acme_gelu.sites:GeluModules").reads_parameters
        True
        >>> SiteRule("GELU modules", "acme_gelu/sites.py")
        Traceback (most recent call last):
            ...
        veomni_core.errors.SpecError: SiteRule 'GELU modules': locator must read "module:attribute", not
        'acme_gelu/sites.py'
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
    """What a plan depends on besides a job's ``model`` section.

    Args:
        device: where the job runs, as torch names devices; ``None`` for the machine's accelerator.
        autocast: the dtype of the ``torch.autocast`` that it trains under; ``None`` for training without it.

    Example:
        >>> def check(path):  # named by a CommandSpec's job_check, for a job with `train: {bf16: true}`
        ...     return JobConditions(autocast="bfloat16")
        >>> check("job.yaml")
        JobConditions(device=None, autocast='bfloat16')
    """

    device: str | None = None
    autocast: str | None = None


@dataclass(frozen=True)
class CommandSpec:
    """A subcommand of the ``veomni`` command line.

    Args:
        name: the subcommand's name.
        target: ``"module:attribute"`` of a function that typer can turn into a command. Imported only when it is used.
        help: one line for ``veomni --help``.
        job_check: for a subcommand that runs jobs, ``"module:attribute"`` of a function that takes the path of a job
            file and raises what the subcommand would raise for that job. It may return the :class:`JobConditions` under
            which the subcommand would plan. ``veomni plan`` calls it for jobs with sections besides ``model``, so that
            it refuses the same jobs.

    Example:
        >>> CommandSpec("profile", "acme_profile.command:profile", help="times every kernel of a job").target
        'acme_profile.command:profile'
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
