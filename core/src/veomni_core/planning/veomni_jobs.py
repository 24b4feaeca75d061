"""Warnings for jobs and environments that were written for VeOmni's own trainer."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping

from veomni_core.descriptions.kernel_spec import EAGER
from veomni_core.ops.catalog import BUILTIN_OPS
from veomni_core.planning.choice import AUTO, Choice

REMOVED_VARIABLES = {
    "VEOMNI_USE_LIGER_KERNEL": "rms_norm_implementation, rotary_pos_emb_implementation, swiglu_mlp_implementation and "
    "cross_entropy_loss_implementation",
    "USE_GROUP_GEMM": "moe_implementation",
    "VEOMNI_ENABLE_CHUNK_LOSS": "cross_entropy_loss_implementation: chunk_loss",
}
_ITS_OPS = {op.name for op in BUILTIN_OPS if op.default != EAGER}
_ITS_OLD_VALUES = {op.name: op.legacy_values for op in BUILTIN_OPS}


def warn_of_removed_variables(environ: Mapping[str, str]) -> None:
    """Warn of environment variables that selected kernels in VeOmni and select none here."""
    for variable, fields in REMOVED_VARIABLES.items():
        if variable in environ:
            warnings.warn(
                f"the environment variable {variable} no longer has any effect; write {fields} under "
                "model.ops_implementation",
                FutureWarning,
                stacklevel=4,
            )


def warn_without_preset(choices: Iterable[Choice]) -> None:
    """Warn if a config without a preset was written for VeOmni: it has old values, or all of VeOmni's fields.

    VeOmni filled the fields that a job leaves out with its own defaults, which are ``preset: gpu`` here.
    """
    written = [choice for choice in choices if choice.written]
    left_out = [choice.config_field for choice in choices if not choice.written and choice.asked == AUTO]
    has_old_values = any(_values(choice.asked) & {*_ITS_OLD_VALUES.get(choice.op_name, ())} for choice in written)
    if left_out and (has_old_values or {choice.op_name for choice in written} >= _ITS_OPS):
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
