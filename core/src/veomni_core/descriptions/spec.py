"""What plugins hand to the core besides ops and kernels: devices, rules, models and commands. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from veomni_core.descriptions.field_types import (
    require_boolean,
    require_integer,
    require_mapping,
    require_name,
    require_reference,
    require_text,
)
from veomni_core.descriptions.hardware import Hardware
from veomni_core.errors import SpecError


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
            :class:`veomni_core.sites.site.EagerSiteLocator`. A sharded model is given to it whole; see
            :class:`veomni_core.sites.site.ShardedSiteLocator` and its neighbours for what it can say of shards.
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
        owner = f"SiteRule {self.name!r}"
        require_name(owner, "name", self.name)
        require_reference(owner, "locator", self.locator)
        require_integer(owner, "order", self.order)
        require_boolean(owner, "installs_eager", self.installs_eager)
        require_boolean(owner, "reads_parameters", self.reads_parameters)
        require_boolean(owner, "proves", self.proves)


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
        owner = f"ModelRule {self.name!r}"
        require_name(owner, "name", self.name)
        require_reference(owner, "rule", self.rule)
        require_integer(owner, "order", self.order)


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
        owner = f"ModelViewSpec {self.name!r}"
        require_name(owner, "name", self.name)
        require_reference(owner, "view", self.view)
        require_integer(owner, "order", self.order)


@dataclass(frozen=True)
class ModelSpec:
    """A model type that a library of models does not have, or how its checkpoints are read.

    Args:
        model_type: as ``config.json`` names it.
        config: ``"module:attribute"`` of the config's class.
        model: the same of the model's class. Both are empty where the library has the type, and only its checkpoints
            need the ``converter``.
        tokenizer: the same of the tokenizer's class, if the library can't find it.
        processor: the same of the processor's class.
        parallel_plan: the same of a mapping ``{"tp": {path: style}, "ep": {path: style}}``, for several ranks.
        converter: the same of a function that takes the model, which may be on the meta device, and returns a converter
            of stored tensors (``can_handle``, ``convert``, ``finalize``).

    Example:
        >>> spec = ModelSpec("acme", config="acme.config:AcmeConfig", model="acme.modeling:AcmeForCausalLM")
        >>> spec.model_type
        'acme'
        >>> ModelSpec("acme", config="acme.config:AcmeConfig")
        Traceback (most recent call last):
            ...
        veomni_core.errors.SpecError: ModelSpec 'acme': config and model are given together, or neither with a
        converter
    """

    model_type: str
    config: str = ""
    model: str = ""
    tokenizer: str = ""
    processor: str = ""
    parallel_plan: str = ""
    converter: str = ""

    def __post_init__(self) -> None:
        owner = f"ModelSpec {self.model_type!r}"
        require_name(owner, "model_type", self.model_type)
        for name in ("config", "model", "tokenizer", "processor", "parallel_plan", "converter"):
            if getattr(self, name) != "":
                require_reference(owner, name, getattr(self, name))
        if bool(self.config) != bool(self.model) or not (self.model or self.converter):
            raise SpecError(f"{owner}: config and model are given together, or neither with a converter")


@dataclass(frozen=True)
class JobConditions:
    """What a plan depends on besides a job's ``model`` section.

    Args:
        device: where the job runs, as torch names devices; ``None`` for the machine's accelerator.
        autocast: the dtype of the ``torch.autocast`` that it trains under; ``None`` for training without it.
        distributed_config: how transformers' engine will shard the model, as fields of its ``DistributedConfig``
            (``{"fsdp_size": 4, "ep_size": 2}``); ``None`` for a model that it doesn't shard.
        dtype: the dtype of the weights; ``None`` for the job's ``model.dtype``.
        ops_implementation: what is planned with in place of the job's section of that name; ``None`` for that section.
        batch: the sequences of a step on one device, and their length; ``None`` where steps differ in shape.
        vocabulary: the number of embeddings that the job's data give its model; ``None`` for what its config says.
        architecture: the class of the job's model, where it is another one than the config's, such as a classifier.
        needs_accelerator: whether the job names an accelerator, so that it doesn't run on a machine without one.

    Example:
        >>> def check(path, hardware, changes=()):  # named by a CommandSpec's job_check, for a job in bfloat16
        ...     return JobConditions(autocast="bfloat16", dtype="float32")
        >>> check("job.yaml", Hardware.named("h200")).autocast
        'bfloat16'
    """

    device: str | None = None
    autocast: str | None = None
    distributed_config: Mapping[str, Any] | None = None
    dtype: str | None = None
    ops_implementation: Mapping[str, Any] | None = None
    batch: tuple[int, int] | None = None
    vocabulary: int | None = None
    architecture: str | None = None
    needs_accelerator: bool = False


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
            It may return the :class:`JobConditions` under which the subcommand would plan. ``veomni plan`` calls it for
            jobs with sections besides ``model``, so that it refuses the same jobs. ``veomni plan --set`` gives it the
            list ``changes`` too: ``["train.steps=100"]``.

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
