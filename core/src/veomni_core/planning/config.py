"""``model.ops_implementation`` of a job, checked against the registry: the kernels that the user requests, per op."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from veomni_core.descriptions.kernel_spec import EAGER
from veomni_core.descriptions.references import load_if_installed
from veomni_core.discovery.discover import discover
from veomni_core.discovery.registry import Registry
from veomni_core.errors import ConfigError, MissingOpsImplementationError, UnknownNameError, did_you_mean
from veomni_core.jobs.jobfile import load_yaml
from veomni_core.planning.choice import AUTO, Choice, expect, is_finite, preset_choice, shown, written_choice

VERIFIED, UNUSED = "verified", "allow_unused"
# What ``require`` may ask; but for the first two, each is the field of a spec that promises it.
REQUIREMENTS = ("nothing", VERIFIED, "batch_invariant", "deterministic")
ON_CHANGE = ("raise", "eager")
TRAINING_LOGITS = ("deferred", "computed", "none")
# The values of each setting that is for all ops; the first is the default.
_SETTINGS = {"on_change": ON_CHANGE, "training_logits": TRAINING_LOGITS}
_VEOMNI_CONFIGS = "veomni_ops.veomni_configs"


@dataclass(frozen=True)
class OpsConfig:
    """The checked config: a :class:`Choice` for every registered op, and the settings that hold for all of them.

    Attributes:
        preset: the name of the preset that filled the fields which the config leaves out; ``auto`` if it names none.
        choices: the choice of each op, by the op's name.
        registry: the plugins against which the config was checked, and from which its kernels are taken.
        backend: ``hf`` if the environment sets ``MODELING_BACKEND=hf``, which turns binding off; else ``veomni``.
        profile: measured milliseconds, ``{op: {kernel: ms}}``; ``auto`` takes the fastest usable kernel listed there.
        on_change: what happens when a setting changes after bind on which the proof of a site depends. ``raise``
            raises; ``eager`` lets the module run its own code again, with a warning and a line in the receipt.
        require: ``verified`` takes only kernels that are certified on this machine, in the dtypes of their sites;
            ``batch_invariant`` and ``deterministic`` only those whose spec promises it. Empty for ``nothing``.
        allow_unused: the config fields that may name a kernel where the model has no site of the op, which is a warning
            then and not an error; ``allow_unused: true`` is all of them. So models of several families share a config.
        training_logits: what ``outputs.logits`` is in a training step with a fused loss. ``deferred``: a tensor that
            is computed when it is first read; ``computed``: computed in each step; ``none``: ``None``.

    Example:
        >>> from veomni_core import discover
        >>> plugins = discover({"VEOMNI_PLUGINS": "veomni-torch"})
        >>> names = {"*.layers.0.*": "eager", "default": ["quack", "torch"]}
        >>> config = OpsConfig.from_dict({"preset": "eager", "rms_norm_implementation": names}, plugins)
        >>> choice = config.choices["rms_norm"]
        >>> choice.group_for("model.layers.0.input_layernorm").names, choice.group_for("model.norm").names
        (('eager',), ('quack', 'torch'))
        >>> OpsConfig.from_dict({"rms_norm_implementaton": "torch"}, plugins)
        Traceback (most recent call last):
            ...
        veomni_core.errors.UnknownNameError: ops_implementation.rms_norm_implementaton: no such field. Did you mean
        'rms_norm_implementation'?
    """

    preset: str
    choices: Mapping[str, Choice]
    registry: Registry = field(repr=False, compare=False)
    backend: str = "veomni"
    profile: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    on_change: str = "raise"
    training_logits: str = "deferred"
    require: tuple[str, ...] = ()
    allow_unused: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: OpsConfig | Mapping[str, Any], registry: Registry | None = None) -> OpsConfig:
        """``config``, checked if it is not yet.

        A mapping is checked against ``registry``, or else against the plugins that are discovered. A checked config
        keeps the registry that it was checked against.

        Raises:
            ConfigError: a checked config comes with another registry than its own.
        """
        if not isinstance(config, OpsConfig):
            return cls.from_dict(config, registry)
        if registry is not None and registry != config.registry:
            raise ConfigError(
                "this OpsConfig was checked against other plugins than those of registry=: leave registry out, or "
                "check the config against it, with OpsConfig.from_dict(data, registry)"
            )
        return config

    @classmethod
    def from_yaml(cls, path: str | Path, registry: Registry | None = None) -> OpsConfig:
        """Read ``model.ops_implementation`` of the job file ``path``."""
        return cls.from_dict(load_yaml(path), registry)

    @classmethod
    def from_dict(
        cls, data: Mapping[str, Any] | None, registry: Registry | None = None, environ: Mapping[str, str] | None = None
    ) -> OpsConfig:
        """Check a config and fill in its preset, which is ``auto`` if the config names none.

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
        expect(isinstance(registry, Registry | None), "registry", registry, "a Registry, as of discover()")
        registry = registry or discover(environ)
        section = _ops_section(data)
        fields = dict(section)
        preset, profile = fields.pop("preset", AUTO), fields.pop("profile", {})
        unused, require = fields.pop(UNUSED, False), fields.pop("require", ())
        asked = require if isinstance(require, (list, tuple)) else [require]
        require = tuple(dict.fromkeys(one_of("require", each, REQUIREMENTS) for each in asked if each != "nothing"))
        settings = {name: one_of(name, fields.pop(name, values[0]), values) for name, values in _SETTINGS.items()}
        presets = known_presets(registry)
        one_of("preset", preset, tuple(presets))
        _check_profile(profile, registry)
        by_field = {op.config_field: op for op in registry.ops.values()}
        for name in fields:
            if name not in by_field:
                hint = load_if_installed("veomni_ops.veomni_names:only_veomnis")
                known = [*by_field, "preset", "profile", UNUSED, "require", *_SETTINGS]
                nearest = (hint and hint(name)) or did_you_mean(str(name), known)
                raise UnknownNameError(f"ops_implementation.{name}: no such field. {nearest}")
        choices = {
            op.name: written_choice(op, fields[name], registry)
            if name in fields
            else preset_choice(op, preset, presets[preset][name])
            for name, op in sorted(by_field.items())
        }
        if "preset" not in section and (warn := load_if_installed(f"{_VEOMNI_CONFIGS}:warn_without_preset")):
            warn(choices.values(), registry.ops)
        allowed = _allowed_unused(unused, by_field)
        backend = one_of("MODELING_BACKEND", environ.get("MODELING_BACKEND", "veomni"), ("veomni", "hf"))
        return cls(preset, choices, registry, backend, profile, **settings, require=require, allow_unused=allowed)

    def with_value(self, config_field: str, value: Any) -> OpsConfig:
        """A copy of this config with one field set to ``value``."""
        op = next(op for op in self.registry.ops.values() if op.config_field == config_field)
        return replace(self, choices={**self.choices, op.name: written_choice(op, value, self.registry)})


def _ops_section(data: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise MissingOpsImplementationError(f"ops_implementation must be a mapping of fields, {shown(data)}. {_SAY_SO}")
    if "model" not in data:
        return data
    model = data["model"]
    if not isinstance(model, Mapping) or model.get("ops_implementation") is None:
        raise MissingOpsImplementationError(f"model.ops_implementation is missing. {_SAY_SO}")
    return _ops_section(model["ops_implementation"])


def one_of(name: str, value: Any, values: tuple[str, ...]) -> str:
    """``value`` of the setting ``name``, which must be one of ``values``."""
    if value not in values:
        raise UnknownNameError(f"{name}: {value!r} is unknown. {did_you_mean(str(value), values)}")
    return str(value)


_SAY_SO = (
    "Say which kernels to use, e.g. `ops_implementation: {preset: auto}`, or `{preset: eager}` for the model's own "
    "code; the section has no default"
)


def known_presets(registry: Registry) -> dict[str, dict[str, str]]:
    """The values that each preset fills in, by config field: the core's presets, and one per device with a preset."""
    ops = registry.ops.values()
    defaults = {op.config_field: op.default for op in ops}
    eager = dict.fromkeys(defaults, EAGER)
    auto = {op.config_field: EAGER if op.on_request else AUTO for op in ops}
    devices = {device.device_type: {**eager, **device.preset} for device in registry.devices.values() if device.preset}
    return {**devices, "gpu": defaults, AUTO: auto, EAGER: eager}


def _check_profile(profile: Any, registry: Registry) -> None:
    expect(isinstance(profile, Mapping), "profile", profile, "{op: {kernel: milliseconds}}")
    for op, times in profile.items():
        registry.op(op)
        expect(isinstance(times, Mapping), f"profile.{op}", times, "{kernel: milliseconds}")
        for name, ms in times.items():
            one_of(f"profile.{op}", name, (EAGER, *registry.known_values(op)))
            expect(is_finite(ms) and ms >= 0, f"profile.{op}.{name}", ms, "milliseconds")


def _allowed_unused(value: Any, fields: Iterable[str]) -> tuple[str, ...]:
    allowed = tuple(fields) if value is True else value or ()
    is_list = isinstance(allowed, Collection) and not isinstance(allowed, (str, Mapping))
    expect(is_list, UNUSED, value, "true, false, or a list of fields")
    return tuple(one_of(UNUSED, name, tuple(fields)) for name in allowed)
