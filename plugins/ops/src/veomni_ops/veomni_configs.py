"""Sections ``ops_implementation`` that were written for VeOmni, whose fields and defaults differ."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import FrozenInstanceError
from dataclasses import fields as fields_of
from typing import Any

from veomni_core.descriptions.kernel_spec import EAGER
from veomni_core.descriptions.op_spec import OpSpec
from veomni_core.discovery.discover import discover
from veomni_core.errors import ConfigError, UnknownNameError, did_you_mean
from veomni_core.planning.choice import AUTO, Choice
from veomni_core.planning.config import OpsConfig
from veomni_ops.veomni_names import OPS


class OpsImplementationConfig(OpsConfig):
    """VeOmni's class: the fields of a section are its arguments, and what they ask for its attributes.

    The same checked config as :class:`veomni_core.OpsConfig`, for whatever takes one.

    Example:
        >>> ops = OpsImplementationConfig(preset="eager", rms_norm_implementation="torch")
        >>> ops.rms_norm_implementation, ops.moe_implementation
        ('torch', 'eager')
    """

    def __init__(self, *checked: Any, **fields: Any) -> None:
        """Check ``fields``, or take the fields of a checked :class:`veomni_core.OpsConfig`, some of them written anew.

        Raises:
            ConfigError: as of :meth:`veomni_core.OpsConfig.from_dict`; or the fields have no names.
        """
        if len(checked) == 1:
            words = "OpsImplementationConfig(preset='auto', attn_implementation='sdpa')"
            raise ConfigError(f"fields have names: write {words}; a mapping goes into OpsConfig.from_dict(...)")
        if not checked and "choices" not in fields:
            fields = dict(vars(OpsConfig.from_dict(fields)))
        kept = {name: fields.pop(name) for name in [*fields] if name in _SETTINGS}
        config = OpsConfig(*checked, **kept)
        known = [choice.config_field for choice in config.choices.values()]
        for name, value in fields.items():  # of dataclasses.replace
            if name not in known:
                raise UnknownNameError(f"ops_implementation.{name}: no such field. {did_you_mean(name, known)}")
            config = config.with_value(name, value)
        super().__init__(**vars(config))

    def __getattr__(self, name: str) -> Any:
        for choice in vars(self).get("choices", {}).values():
            if choice.config_field == name:
                return choice.asked
        raise AttributeError(f"{type(self).__name__} has no field {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        raise FrozenInstanceError(f"it is checked, and stays so: write dataclasses.replace(ops, {name}={value!r})")

    def __deepcopy__(self, memo: Any) -> OpsImplementationConfig:
        return self

    def __reduce__(self) -> Any:
        """As it was written, to be checked by the process that reads it, against the plugins there."""
        written = {each.config_field: each.asked for each in self.choices.values() if each.written}
        settings = {name: getattr(self, name) for name in _SETTINGS - {"choices", "registry", "backend"}}
        return _read, ({**settings, **written},)


_SETTINGS = {each.name for each in fields_of(OpsConfig)}


def _read(written: Mapping[str, Any]) -> OpsImplementationConfig:
    return OpsImplementationConfig(**written)


def line_for_slot(op_name: str, kernel: str) -> str:
    """The line that binds ``kernel``, as VeOmni's registry calls it, where its code binds a slot of ``op_name``.

    Example:
        >>> line_for_slot("apply_rotary_pos_emb", "liger")
        "veomni_core.bind(model, {'rotary_pos_emb_implementation': 'liger_kernel'})"
    """
    registry, name = discover(), OPS.get(op_name, op_name)
    if op := registry.ops.get(name):
        known = [EAGER, *registry.known_values(name)]
        named = [op.legacy_values.get(kernel, kernel), *(each for each in known if kernel and kernel in each)]
        kernel = next((each for each in named if each in known), kernel)
    field = op.config_field if op else f"{name}_implementation"
    return f"veomni_core.bind(model, {{{field!r}: {kernel!r}}})"


def warn_without_preset(choices: Iterable[Choice], ops: Mapping[str, OpSpec]) -> None:
    """Warn if a config without a preset was written for VeOmni: it has old values, or all of VeOmni's fields.

    VeOmni filled the fields that a job leaves out with its own defaults, which are ``preset: gpu`` here.

    Args:
        choices: the config's choices for all of ``ops``.
        ops: the registered ops, by name.

    Example:
        >>> from veomni_core import OpsConfig
        >>> config = OpsConfig.from_dict({"preset": "auto"})
        >>> warn_without_preset(config.choices.values(), config.registry.ops)  # nothing in it is VeOmni's
    """
    choices = list(choices)
    written = {choice.op_name: choice.asked for choice in choices if choice.written}
    left_out = [choice.config_field for choice in choices if not choice.written and choice.asked == AUTO]
    has_old_values = any(name in ops[op].legacy_values for op, asked in written.items() for name in _names_in(asked))
    if left_out and (has_old_values or written.keys() >= {op.name for op in ops.values() if op.default != EAGER}):
        warnings.warn(
            f"ops_implementation names no preset, so the fields that it leaves out are {AUTO}: {', '.join(left_out)}. "
            f"Write `preset: {AUTO}` to keep that, or `preset: gpu` for VeOmni's own defaults",
            FutureWarning,
            stacklevel=3,
        )


def _names_in(asked: object) -> Iterator[str]:
    """The names that a field's value mentions."""
    if isinstance(asked, str):
        yield asked
    for part in asked.values() if isinstance(asked, Mapping) else asked if isinstance(asked, list) else ():
        yield from _names_in(part)
