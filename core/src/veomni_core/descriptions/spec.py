"""What plugins hand to the core besides ops and kernels: devices, site rules and commands. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from veomni_core.descriptions.field_types import check_fields
from veomni_core.descriptions.hardware import Hardware


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
        check_fields(self, f"DeviceSpec {self.device_type!r}", names=("device_type",), references=("detect",))


@dataclass(frozen=True)
class SiteRule:
    """How to find an op in models, and how to put a kernel there.

    Args:
        name: the rule's name, for messages.
        locator: ``"module:attribute"`` of a class without constructor parameters that has the two methods of
            :class:`veomni_core.sites.site.SiteLocator`, and with ``installs_eager`` also that of
            :class:`veomni_core.sites.site.EagerSiteLocator`. A sharded model is given to it whole; see
            ``veomni_transformers.engine.engine_layout`` for what it can say of shards.
        order: rules with a low order apply their changes first, which matters if two rules change one module.
        installs_eager: whether ``eager`` must be installed too, because the model may be set to something else.
        reads_parameters: whether the rule looks at parameters. A rule that doesn't also runs on models whose parameters
            FSDP1 has flattened.
        proves: whether each site with a variant was compared by value with the variant's reference, as ``probe`` and
            ``ModuleLocator`` do. Sites of other rules are declared: plan and receipt say that nothing proved them.

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
    proves: bool = False

    def __post_init__(self) -> None:
        check_fields(self, references=("locator",))


@dataclass(frozen=True)
class ModelRule:
    """What a binding changes in a model besides its sites, such as how packed sequences reach its layers.

    Args:
        name: the rule's name, which owns its changes.
        rule: ``"module:attribute"`` of a class without constructor parameters that has the methods of
            :class:`veomni_core.binding.model_rules.WholeModelRule`.
        order: rules with a low order change the model first; those below 0 before its sites are bound.

    Example:
        >>> ModelRule("no second binding", "acme.rules:KeepOut", order=-10).order
        -10
    """

    name: str
    rule: str
    order: int = 50

    def __post_init__(self) -> None:
        check_fields(self, references=("rule",))


@dataclass(frozen=True)
class ModelViewSpec:
    """How models are read that are divided over ranks, or known already.

    Args:
        name: the view's name, for messages.
        view: ``"module:attribute"`` of a function that takes a model and the ``distributed_config`` of
            :func:`veomni_core.make_plan`, and returns a :class:`veomni_core.sites.model_view.ModelView`, or ``None``
            for a model that it does not know.
        order: of several views, the one with the lowest order that knows a model reads it.

    Example:
        >>> ModelViewSpec("pipelines", "acme.pipelines:stage_of").order
        50
    """

    name: str
    view: str
    order: int = 50

    def __post_init__(self) -> None:
        check_fields(self, references=("view",))


@dataclass(frozen=True)
class CommandSpec:
    """A subcommand of the ``veomni`` command line.

    Args:
        name: the subcommand's name.
        target: ``"module:attribute"`` of a function that typer can turn into a command, or of a ``typer.Typer`` that
            has one. Imported only when it is used.
        help: one line for ``veomni --help``.
        job_check: for a subcommand that runs jobs, ``"module:attribute"`` of a function that takes the path of a job
            file and the :class:`Hardware` that is planned for, and raises what the subcommand would raise for that job.
            It may return the :class:`veomni_core.JobConditions` under which the subcommand would plan. ``veomni plan``
            calls it for jobs with sections besides ``model``, so that it refuses the same jobs. ``veomni plan --set``
            gives it the list ``changes`` too: ``["train.steps=100"]``.

    Example:
        >>> CommandSpec("profile", "acme_profile.command:profile", help="times every kernel of a job").target
        'acme_profile.command:profile'
    """

    name: str
    target: str
    help: str = ""
    job_check: str = ""

    def __post_init__(self) -> None:
        check_fields(self, references=("target",), optional_references=("job_check",))
