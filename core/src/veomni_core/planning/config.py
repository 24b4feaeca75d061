"""``model.ops_implementation`` of a job, checked against the registry: the kernels that the user requests, per op."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from veomni_core.descriptions.op_spec import OpSpec
from veomni_core.descriptions.spec import EAGER
from veomni_core.discovery.discover import discover
from veomni_core.discovery.registry import Registry
from veomni_core.errors import ConfigError, MissingOpsImplementationError, UnknownNameError, did_you_mean
from veomni_core.jobs.jobfile import load_yaml

AUTO = "auto"
DEFAULT = "default"
ON_CHANGE = ("raise", "eager")
TRAINING_LOGITS = ("deferred", "computed", "none")
REMOVED_VARIABLES = {
    "VEOMNI_USE_LIGER_KERNEL": "rms_norm_implementation, rotary_pos_emb_implementation, swiglu_mlp_implementation and "
    "cross_entropy_loss_implementation",
    "USE_GROUP_GEMM": "moe_implementation",
    "VEOMNI_ENABLE_CHUNK_LOSS": "cross_entropy_loss_implementation: chunk_loss",
}


@dataclass(frozen=True)
class Choice:
    """What one config field requests: kernel names in order of preference, per glob of module paths.

    Attributes:
        op_name, config_field: the op, and its key under ``ops_implementation``.
        asked: the value as it stands in the config.
        default: the names for module paths that match no glob.
        per_module: ``(glob, names)`` pairs; the first glob that matches a module's path decides.
        written: False if the preset filled the field.
    """

    op_name: str
    config_field: str
    asked: Any
    default: tuple[str, ...]
    per_module: tuple[tuple[str, tuple[str, ...]], ...] = ()
    written: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that the field mentions."""
        return tuple(dict.fromkeys([*self.default, *(name for _, names in self.per_module for name in names)]))

    def glob_for(self, path: str) -> str | None:
        """The first glob, in the config's order, that matches a module's path; ``None`` if none does."""
        return next((glob for glob, _ in self.per_module if fnmatchcase(path, glob)), None)

    def names_for(self, path: str) -> tuple[str, ...]:
        """The names that are requested for a module's path."""
        glob = self.glob_for(path)
        return self.default if glob is None else dict(self.per_module)[glob]


@dataclass(frozen=True)
class OpsConfig:
    """The checked config: a :class:`Choice` for every registered op, and the settings that hold for all of them.

    Attributes:
        preset: the name of the preset that filled the fields which the config leaves out.
        choices: the choice of each op, by the op's name.
        registry: the plugins against which the config was checked.
        backend: ``hf`` if the environment sets ``MODELING_BACKEND=hf``, which turns binding off; else ``veomni``.
        profile: measured milliseconds, ``{op: {kernel: ms}}``; ``auto`` takes the fastest usable kernel listed there.
        on_change: what happens when a setting changes after bind on which the proof of a site depends. ``raise``
            raises; ``eager`` lets the module run its own code again, with a warning and a line in the receipt.
        training_logits: what ``outputs.logits`` is in a training step with a fused loss. ``deferred``: a tensor that
            is computed when it is first read; ``computed``: computed in each step; ``none``: ``None``.
    """

    preset: str
    choices: Mapping[str, Choice]
    registry: Registry = field(repr=False, compare=False)
    backend: str = "veomni"
    profile: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    on_change: str = "raise"
    training_logits: str = "deferred"

    @classmethod
    def from_yaml(cls, path: str | Path, registry: Registry | None = None) -> OpsConfig:
        """Read ``model.ops_implementation`` of the job file ``path``."""
        return cls.from_dict(load_yaml(path), registry)

    @classmethod
    def from_dict(
        cls, data: Mapping[str, Any] | None, registry: Registry | None = None, environ: Mapping[str, str] | None = None
    ) -> OpsConfig:
        """Check a config and fill in its preset.

        Args:
            data: the mapping under ``ops_implementation``, or a whole job with one under ``model``.
            registry: the plugins to check against; discovered without it.
            environ: the environment variables; ``os.environ`` without it.

        Raises:
            MissingOpsImplementationError: the job has no ``model.ops_implementation``.
            UnknownNameError: an unknown field, value or preset; the message suggests the nearest spelling.
            ConfigError: a value has the wrong type.
        """
        environ = os.environ if environ is None else environ
        registry = registry or discover(environ)
        fields = dict(_ops_section(data))
        preset = fields.pop("preset", "gpu")
        profile = fields.pop("profile", {})
        on_change = _one_of(fields, "on_change", ON_CHANGE)
        training_logits = _one_of(fields, "training_logits", TRAINING_LOGITS)
        presets = _presets(registry)
        if str(preset) not in presets:
            raise UnknownNameError(f"preset: {preset!r} is unknown. {did_you_mean(str(preset), presets)}")
        _check_profile(profile, registry)
        by_field = {op.config_field: op for op in registry.ops.values()}
        for name in fields:
            if name not in by_field:
                nearest = did_you_mean(str(name), [*by_field, "preset", "profile", "on_change", "training_logits"])
                raise UnknownNameError(f"ops_implementation.{name}: no such field. {nearest}")
        _warn_of_removed_variables(environ)
        return cls(
            preset=preset,
            choices={
                op.name: _written_choice(op, fields[name], registry)
                if name in fields
                else _preset_choice(op, presets[preset][name])
                for name, op in sorted(by_field.items())
            },
            registry=registry,
            backend=_modeling_backend(environ),
            profile=profile,
            on_change=on_change,
            training_logits=training_logits,
        )

    def with_value(self, config_field: str, value: Any) -> OpsConfig:
        """A copy of this config with one field set to ``value``."""
        op = next(op for op in self.registry.ops.values() if op.config_field == config_field)
        return replace(self, choices={**self.choices, op.name: _written_choice(op, value, self.registry)})


def _ops_section(data: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise MissingOpsImplementationError(
            f"ops_implementation must be a mapping of fields, {_shown(data)}. {_SAY_SO}"
        )
    if "model" not in data:
        return data
    model = data["model"]
    if not isinstance(model, Mapping) or model.get("ops_implementation") is None:
        raise MissingOpsImplementationError(f"model.ops_implementation is missing. {_SAY_SO}")
    return _ops_section(model["ops_implementation"])


def _one_of(fields: dict[str, Any], name: str, values: tuple[str, ...]) -> str:
    """Remove the setting ``name`` from ``fields`` and return its value; ``values[0]`` if it is not set."""
    value = fields.pop(name, values[0])
    if value not in values:
        raise UnknownNameError(f"{name}: {value!r} is unknown. {did_you_mean(str(value), values)}")
    return str(value)


_SAY_SO = (
    "Say which kernels to use, e.g. `ops_implementation: {preset: auto}`, or `{preset: eager}` for the model's own "
    "code; there is no default"
)


def _shown(value: Any) -> str:
    return "got nothing" if value is None else f"got {value!r} ({type(value).__name__})"


def _presets(registry: Registry) -> dict[str, dict[str, str]]:
    """The values that each preset fills in, by config field: the core's presets, and one per device with a preset."""
    defaults = {op.config_field: op.default for op in registry.ops.values()}
    eager = dict.fromkeys(defaults, EAGER)
    devices = {device.device_type: {**eager, **device.preset} for device in registry.devices.values() if device.preset}
    return {**devices, "gpu": defaults, AUTO: dict.fromkeys(defaults, AUTO), EAGER: eager}


def _preset_choice(op: OpSpec, name: str) -> Choice:
    return Choice(op.name, op.config_field, asked=name, default=(name,), written=False)


def _written_choice(op: OpSpec, value: Any, registry: Registry) -> Choice:
    where = op.config_field
    if not isinstance(value, Mapping):
        return Choice(op.name, where, value, _checked_names(op, where, value, registry))
    globs = {str(glob): value[glob] for glob in value}
    default = globs.pop(DEFAULT, EAGER)
    return Choice(
        op.name,
        where,
        dict(value),
        default=_checked_names(op, f"{where}.{DEFAULT}", default, registry),
        per_module=tuple(
            (glob, _checked_names(op, f"{where}[{glob!r}]", names, registry)) for glob, names in globs.items()
        ),
    )


def _checked_names(op: OpSpec, where: str, value: Any, registry: Registry) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"{where}: expected a kernel's name, a list of names, or a mapping from module paths to these; "
            f"{_shown(value)}"
        )
    known = [EAGER, AUTO, *registry.known_values(op.name)]
    return tuple(_checked_name(op, where, name, known, registry) for name in names)


def _checked_name(op: OpSpec, where: str, name: str, known: list[str], registry: Registry) -> str:
    if name in known:
        return name
    if name in op.legacy_values:
        present = op.legacy_values[name]
        warnings.warn(f"{where}: {name} is now called {present}; please write that", FutureWarning, stacklevel=5)
        return present
    message = f"{where}: {name!r} is unknown. {did_you_mean(name, known)}"
    for plugin in registry.failed():
        message += f" (It may belong to {plugin}, which failed to load: {plugin.problem})"
    raise UnknownNameError(message)


def _check_profile(profile: Any, registry: Registry) -> None:
    if not isinstance(profile, Mapping):
        raise ConfigError(f"profile: expected {{op: {{kernel: milliseconds}}}}, {_shown(profile)}")
    for op, times in profile.items():
        registry.op(op)
        if not isinstance(times, Mapping) or not all(isinstance(ms, (int, float)) for ms in times.values()):
            raise ConfigError(f"profile.{op}: expected {{kernel: milliseconds}}, {_shown(times)}")


def _warn_of_removed_variables(environ: Mapping[str, str]) -> None:
    for variable, fields in REMOVED_VARIABLES.items():
        if variable in environ:
            warnings.warn(
                f"the environment variable {variable} no longer has any effect; write {fields} under "
                "model.ops_implementation",
                FutureWarning,
                stacklevel=4,
            )


def _modeling_backend(environ: Mapping[str, str]) -> str:
    backend = environ.get("MODELING_BACKEND", "veomni")
    if backend not in ("veomni", "hf"):
        raise UnknownNameError(f"MODELING_BACKEND={backend!r} is unknown. {did_you_mean(backend, ['veomni', 'hf'])}")
    return backend
