"""The frozen result of discovery: all ops, kernels, devices and site rules, and a record of every plugin."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from veomni_core.descriptions.hardware import Hardware
from veomni_core.descriptions.kernel_spec import KernelSpec
from veomni_core.descriptions.op_spec import OpSpec, VariantSpec
from veomni_core.descriptions.references import call_attribute, load_attribute, raise_interrupt
from veomni_core.descriptions.spec import CommandSpec, DeviceSpec, ModelRule, ModelViewSpec, SiteRule
from veomni_core.errors import HostError, KernelUnavailableError, UnknownNameError, did_you_mean

Status = Literal["loaded", "failed", "blocked"]
_Rule = TypeVar("_Rule", SiteRule, ModelRule, ModelViewSpec)

_DIGEST_SHOWN = 16  # 64 bits: enough to tell one content from another

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SkippedKernel:
    """A kernel of a loaded plugin that can't be used because its op, variant or device type is unknown, and why."""

    spec: KernelSpec
    reason: str

    def __str__(self) -> str:
        return f"kernel {self.spec}: {self.reason}"


@dataclass(frozen=True)
class PluginRecord:
    """One installed plugin, and what it describes.

    A failed plugin keeps its kernels here, so that an error about a config that names one of them can say why.

    Attributes:
        name: the name of its entry point.
        distribution, version: the distribution that installed it.
        module: the module that its entry point names.
        status: ``loaded``, ``failed`` or ``blocked``.
        problem: why it failed, or what blocks it.
        traceback: the traceback of a plugin that raised.
        seconds: how long it took to load.
        ops, variants, devices, site_rules, model_rules, model_views, models, commands: what its hooks returned.
        defines: whether it is in the entry-point group ``veomni.definitions``: it has no kernels, ``VEOMNI_PLUGINS``
            does not leave it out, and a rule of it that fails is an error.
        kernels: the kernels whose op, variant and device type are known.
        skipped: the other ones.

    Example:
        >>> from veomni_core import discover
        >>> record = discover({"VEOMNI_PLUGINS_BLOCK": "veomni-torch"}).plugin("veomni-torch")
        >>> record.status, record.problem
        ('blocked', 'VEOMNI_PLUGINS_BLOCK names it')
    """

    name: str
    distribution: str
    version: str
    module: str
    status: Status = "loaded"
    problem: str = ""
    traceback: str = ""
    seconds: float = 0.0
    ops: tuple[OpSpec, ...] = ()
    variants: tuple[VariantSpec, ...] = ()
    kernels: tuple[KernelSpec, ...] = ()
    skipped: tuple[SkippedKernel, ...] = ()
    devices: tuple[DeviceSpec, ...] = ()
    site_rules: tuple[SiteRule, ...] = ()
    model_rules: tuple[ModelRule, ...] = ()
    model_views: tuple[ModelViewSpec, ...] = ()
    models: tuple[Any, ...] = ()
    commands: tuple[CommandSpec, ...] = ()
    defines: bool = False

    @property
    def healthy(self) -> bool:
        """Whether the plugin loaded, so that what it describes is in the registry."""
        return self.status == "loaded"

    @property
    def rules(self) -> tuple[SiteRule | ModelRule | ModelViewSpec, ...]:
        """Its rules of all kinds."""
        return (*self.site_rules, *self.model_rules, *self.model_views)

    @property
    def absence(self) -> str:
        """What became of a plugin that is not healthy, in the words that follow "which"."""
        return f"{'is blocked' if self.status == 'blocked' else self.status}: {self.problem}"

    def version_of(self, spec: KernelSpec) -> str:
        """The version that tells what runs: the plugin's, and the digest of code that it loads from elsewhere."""
        return f"{self.version}+{spec.digest[:_DIGEST_SHOWN]}" if spec.digest else self.version

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


@dataclass(frozen=True)
class Registry:
    """Everything that the loaded plugins describe. Made by :func:`veomni_core.discover`.

    Attributes:
        plugins: a record of every installed plugin, also of those that failed or are blocked.
        ops, devices, models, commands: what the loaded plugins describe, by name.
        site_rules, model_rules, model_views: each in the order in which they are used.
        conflicts: by op, variant and name, the plugins of each kernel that several describe. It is not registered.

    Example:
        >>> from veomni_core import discover
        >>> registry = discover({"VEOMNI_PLUGINS": "veomni-torch"})
        >>> str(registry.resolve("swiglu_mlp", "standard", "torch"))
        'swiglu_mlp/standard:torch'
        >>> h200 = registry.named_hardware("h200")
        >>> [spec.name for spec in registry.list_available("attention", "standard", h200)]
        ['sdpa']
    """

    plugins: tuple[PluginRecord, ...] = ()
    ops: Mapping[str, OpSpec] = field(default_factory=lambda: MappingProxyType({}))
    site_rules: tuple[SiteRule, ...] = ()
    model_rules: tuple[ModelRule, ...] = ()
    model_views: tuple[ModelViewSpec, ...] = ()
    devices: Mapping[str, DeviceSpec] = field(default_factory=lambda: MappingProxyType({}))
    models: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    commands: Mapping[str, CommandSpec] = field(default_factory=lambda: MappingProxyType({}))
    conflicts: Mapping[tuple[str, str, str], tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    _kernels: Mapping[str, tuple[KernelSpec, ...]] = field(default_factory=lambda: MappingProxyType({}))
    _owners: Mapping[tuple[str, str, str], PluginRecord] = field(default_factory=lambda: MappingProxyType({}))

    def op(self, name: str) -> OpSpec:
        """The op called ``name``.

        Raises:
            UnknownNameError: no such op is registered.
        """
        if name not in self.ops:
            raise UnknownNameError(f"op {name!r} is not registered. {did_you_mean(name, self.ops)}")
        return self.ops[name]

    def canonical_variant(self, op: str, variant: str | None) -> str | None:
        """``variant`` with an alias of ``op`` resolved; ``None`` stays ``None``."""
        return variant and self.op(op).canonical_variant(variant)

    def kernels(self, op: str, variant: str | None = None) -> tuple[KernelSpec, ...]:
        """The kernels of ``op``, or of one variant of it, sorted by variant and name."""
        self.op(op)
        wanted = self.canonical_variant(op, variant)
        return tuple(kernel for kernel in self._kernels.get(op, ()) if wanted in (None, kernel.variant))

    def find(self, op: str, variant: str, name: str) -> KernelSpec | None:
        """The kernel ``name`` for this variant of ``op``, or ``None``."""
        return next((kernel for kernel in self.kernels(op, variant) if kernel.name == name), None)

    def resolve(self, op: str, variant: str, name: str) -> KernelSpec:
        """The kernel ``name`` for this variant of ``op``.

        Raises:
            UnknownNameError: no kernel has that name.
            KernelUnavailableError: the name is known, but the kernel is not in the registry; the message says why.
        """
        kernel = self.find(op, variant, name)
        if kernel is not None:
            return kernel
        variants = sorted({spec.variant for spec in self.kernels(op) if spec.name == name})
        reason = self.absence(op, name, variant)
        if variants and reason is None:
            raise KernelUnavailableError(f"{op}: {name} covers {', '.join(variants)}, not {variant}")
        if reason is None:
            raise UnknownNameError(f"{op}: no kernel is called {name!r}. {did_you_mean(name, self.known_values(op))}")
        raise KernelUnavailableError(f"{op}: {reason}")

    def absence(self, op: str, name: str, variant: str = "") -> str | None:
        """Why a known kernel is not in the registry; ``None`` if it is there, or if no such kernel is known."""
        for (op_name, claimed, kernel_name), claimants in self.conflicts.items():
            if (op_name, kernel_name) == (op, name) and (claimed == variant or name not in self._names(op)):
                who = " and ".join(claimants)
                return f"{name} for {claimed} is claimed by {who}; block all but one of them with VEOMNI_PLUGINS_BLOCK"
        if name in self._names(op):
            return None
        published = self.op(op).published
        for plugin in self.plugins:
            describes = any((spec.op_name, spec.name) == (op, name) for spec in plugin.kernels)
            if not plugin.healthy and (describes or plugin.distribution == published.get(name)):
                return f"{name} is provided by {plugin}, which {plugin.absence}"
            for skipped in plugin.skipped:
                if (skipped.spec.op_name, skipped.spec.name) == (op, name):
                    return f"{name} is provided by {plugin}, but left out: {skipped.reason}"
        if name not in published:
            return None
        if not published[name]:
            return f"{name} is not provided by any distribution yet"
        return f"{name} is not installed: pip install {published[name]}"

    def describe_conflicts(self) -> tuple[str, ...]:
        """One sentence for each kernel that several plugins describe."""
        return tuple(
            f"kernel {op}/{variant}:{name} is claimed by {' and '.join(claimants)}, so neither is used; block one of "
            "them with VEOMNI_PLUGINS_BLOCK"
            for (op, variant, name), claimants in sorted(self.conflicts.items())
        )

    def known_values(self, op: str) -> tuple[str, ...]:
        """Every kernel name that is known for ``op``, including kernels that can't be used here.

        Those are kernels that conflict, were skipped, come from a failed plugin, or are published but not installed.
        """
        failed = [spec for plugin in self.plugins if not plugin.healthy for spec in plugin.kernels]
        skipped = [kernel.spec for plugin in self.plugins for kernel in plugin.skipped]
        broken = {spec.name for spec in (*failed, *skipped) if spec.op_name == op}
        claimed = {name for op_name, _, name in self.conflicts if op_name == op}
        return tuple(sorted({*self._names(op), *self.op(op).published, *broken, *claimed}))

    def list_available(self, op: str, variant: str | None, hardware: Hardware) -> tuple[KernelSpec, ...]:
        """The kernels of ``op``, or of one variant, whose requirements ``hardware`` meets."""
        return tuple(spec for spec in self.kernels(op, variant) if not spec.hardware.unmet(hardware))

    def plugin_of(self, spec: KernelSpec) -> PluginRecord:
        """The plugin that registered ``spec``."""
        return self._owners[(spec.op_name, self.op(spec.op_name).canonical_variant(spec.variant), spec.name)]

    def vouches_for(self, spec: KernelSpec) -> bool:
        """Whether the op's own plugin vouches for ``spec``: it is published there, or of the same distribution.

        A variant that another plugin adds is that plugin's own.
        """
        op, distribution = self.op(spec.op_name), self.plugin_of(spec).distribution
        variant = (spec.op_name, op.canonical_variant(spec.variant))
        own = (
            record.distribution
            for record in self.plugins
            if any(each.name == op.name for each in record.ops if spec.variant not in op.added)
            or any((each.op_name, each.name) == variant for each in record.variants)
        )
        return op.published.get(spec.name) == distribution or distribution in own

    def plugin_of_rule(self, rule: SiteRule | ModelRule | ModelViewSpec) -> PluginRecord | None:
        """The plugin that describes ``rule``; ``None`` if no loaded plugin does."""
        return next((record for record in self.plugins if record.healthy and rule in record.rules), None)

    def plugin(self, name: str) -> PluginRecord:
        """The record of the plugin (or distribution) called ``name``."""
        for record in self.plugins:
            if name in (record.name, record.distribution):
                return record
        known = [record.name for record in self.plugins]
        raise UnknownNameError(f"plugin {name!r} is not installed. {did_you_mean(name, known)}")

    def failed(self) -> tuple[PluginRecord, ...]:
        """The plugins that failed to load."""
        return tuple(record for record in self.plugins if record.status == "failed")

    def named_hardware(self, name: str) -> Hardware:
        """The hardware called ``name``, including names from plugins' :class:`~veomni_core.DeviceSpec`."""
        extra = {key: value for device in self.devices.values() for key, value in device.named.items()}
        return Hardware.named(name, extra)

    def detect_hardware(self, device_type: str | None = None) -> Hardware:
        """The hardware of this machine: a plugin's device if a plugin detects one, else what torch sees.

        Args:
            device_type: torch's name for the type that is required. ``cpu`` selects the CPU of a machine with a GPU.

        Raises:
            HostError: the machine has no device of that type.
        """
        if device_type == "cpu":
            return Hardware.cpu()
        found = self.detect_plugin_device() or Hardware.detect()
        if device_type not in (None, found.torch_device_type):
            raise HostError(f"device {device_type} was requested, but this machine has {found.describe()}")
        return found

    def detect_plugin_device(self) -> Hardware | None:
        """The device of this machine that a plugin detects, or ``None``; without asking torch for others."""
        for device in self.devices.values():
            found, problem = detect(device)
            if problem:  # a broken plugin must not affect the others
                logger.warning("device type %s counts as absent: %s", device.device_type, problem)
            if found is not None:
                return found
        return None

    def _names(self, op: str) -> set[str]:
        return {kernel.name for kernel in self._kernels.get(op, ())}


def detect(device: DeviceSpec) -> tuple[Hardware | None, str]:
    """Call ``device.detect``. Returns the hardware, or ``None``; and what went wrong, which is empty if nothing did."""
    try:
        found = call_attribute(device.detect)
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        raise_interrupt(error)
        return None, f"{device.detect} failed: {error!r}"
    what = f"{device.detect} must return a Hardware or None, not {found!r} ({type(found).__name__})"
    return (found, "") if found is None or isinstance(found, Hardware) else (None, what)


def load_rule(registry: Registry, rule: ModelRule | ModelViewSpec, reference: str) -> Any:
    """What ``reference`` of ``rule`` names; ``None``, with a warning, where a plugin can't load it that defines no ops.

    A plugin that is half uninstalled must not keep other jobs from running.
    """
    try:
        return load_attribute(reference)
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        raise_interrupt(error)
        plugin = registry.plugin_of_rule(rule)
        if plugin is None or plugin.defines:
            raise
        logger.warning("%r of %s is left out: %s failed: %r", rule.name, plugin, reference, error)
        return None


def ops_of(records: Iterable[PluginRecord]) -> dict[str, OpSpec]:
    """The ops of the loaded plugins by name, with the variants that plugins add; one of an unknown op is left out."""
    healthy = sorted((record for record in records if record.healthy), key=lambda each: (each.name, each.distribution))
    ops = {op.name: op for record in healthy for op in record.ops}
    for variant in (variant for record in healthy for variant in record.variants):
        if op := ops.get(variant.op_name):
            added = {**op.added, variant.name: variant.contract}
            ops[op.name] = replace(op, variants=(*op.variants, variant.name), added=added)
    return ops


def build_registry(
    records: Iterable[PluginRecord], conflicts: Mapping[tuple[str, str, str], tuple[str, ...]]
) -> Registry:
    """Freeze what the loaded plugins among ``records`` describe, without the kernels in ``conflicts``."""
    plugins = tuple(sorted(records, key=lambda record: (record.name, record.distribution)))
    healthy = [record for record in plugins if record.healthy]
    owners = {spec.key: record for record in healthy for spec in record.kernels if spec.key not in conflicts}
    by_op: dict[str, list[KernelSpec]] = {}
    for spec in sorted((spec for record in healthy for spec in record.kernels), key=lambda spec: spec.key):
        if spec.key in owners:
            by_op.setdefault(spec.op_name, []).append(spec)
    return Registry(
        plugins=plugins,
        ops=MappingProxyType(ops_of(healthy)),
        site_rules=_ordered(record.site_rules for record in healthy),
        model_rules=_ordered(record.model_rules for record in healthy),
        model_views=_ordered(record.model_views for record in healthy),
        devices=MappingProxyType({device.device_type: device for record in healthy for device in record.devices}),
        models=MappingProxyType({model.model_type: model for record in healthy for model in record.models}),
        commands=MappingProxyType({command.name: command for record in healthy for command in record.commands}),
        conflicts=MappingProxyType(dict(conflicts)),
        _kernels=MappingProxyType({op: tuple(specs) for op, specs in by_op.items()}),
        _owners=MappingProxyType(owners),
    )


def _ordered(described: Iterable[tuple[_Rule, ...]]) -> tuple[_Rule, ...]:
    rules = [rule for each in described for rule in each]
    return tuple(sorted(rules, key=lambda rule: (rule.order, rule.name)))
