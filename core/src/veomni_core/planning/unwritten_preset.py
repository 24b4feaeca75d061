"""Warns of configs without a preset that were written for VeOmni, whose defaults differ."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping

from veomni_core.descriptions.kernel_spec import EAGER
from veomni_core.descriptions.op_spec import OpSpec
from veomni_core.planning.choice import AUTO, Choice


def warn_without_preset(choices: Iterable[Choice], ops: Iterable[OpSpec]) -> None:
    """Warn if a config without a preset was written for VeOmni: it has old values, or all of VeOmni's fields.

    VeOmni filled the fields that a job leaves out with its own defaults, which are ``preset: gpu`` here.
    """
    ops = list(ops)
    its_ops = {op.name for op in ops if op.default != EAGER}
    old_values = {op.name: op.legacy_values for op in ops}
    written = [choice for choice in choices if choice.written]
    left_out = [choice.config_field for choice in choices if not choice.written and choice.asked == AUTO]
    has_old_values = any(_values(choice.asked) & {*old_values.get(choice.op_name, ())} for choice in written)
    if left_out and (has_old_values or {choice.op_name for choice in written} >= its_ops):
        warnings.warn(
            f"ops_implementation names no preset, so the fields that it leaves out are {AUTO}: {', '.join(left_out)}. "
            f"Write `preset: {AUTO}` to keep that, or `preset: gpu` for VeOmni's own defaults",
            FutureWarning,
            stacklevel=3,
        )


def _values(asked: object) -> set[str]:
    """The names that a field's value mentions."""
    if isinstance(asked, str):
        return {asked}
    parts = asked.values() if isinstance(asked, Mapping) else asked if isinstance(asked, list) else ()
    return {name for part in parts for name in _values(part)}
