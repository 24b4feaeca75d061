"""Sections ``ops_implementation`` that were written for VeOmni, whose fields and defaults differ."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from veomni_core.descriptions.kernel_spec import EAGER
from veomni_core.descriptions.op_spec import OpSpec
from veomni_core.planning.choice import AUTO, Choice
from veomni_core.planning.config import OpsConfig


class OpsImplementationConfig(OpsConfig):
    """VeOmni's class: the fields of a section are its arguments, and what they ask for its attributes.

    The same checked config as :class:`veomni_core.OpsConfig`, for whatever takes one.

    Example:
        >>> ops = OpsImplementationConfig(preset="eager", rms_norm_implementation="torch")
        >>> ops.rms_norm_implementation, ops.moe_implementation
        ('torch', 'eager')
    """

    def __init__(self, *checked: Any, **fields: Any) -> None:
        """Check ``fields``, or take the fields of a checked :class:`veomni_core.OpsConfig`.

        Raises:
            ConfigError: as of :meth:`veomni_core.OpsConfig.from_dict`.
        """
        if not checked and "choices" not in fields:
            fields = dict(vars(OpsConfig.from_dict(fields)))
        super().__init__(*checked, **fields)

    def __getattr__(self, name: str) -> Any:
        for choice in vars(self).get("choices", {}).values():
            if choice.config_field == name:
                return choice.asked
        raise AttributeError(f"{type(self).__name__} has no field {name!r}")


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
