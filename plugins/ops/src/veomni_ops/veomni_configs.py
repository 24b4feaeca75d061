"""Sections ``ops_implementation`` that were written for VeOmni, whose fields and defaults differ."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping

from veomni_core.descriptions.kernel_spec import EAGER
from veomni_core.descriptions.op_spec import OpSpec
from veomni_core.planning.choice import AUTO, Choice

_FOR_SINGLE_MODELS = {
    "dsa_attention_implementation": "DeepSeek's sparse attention",
    "dsa_indexer_implementation": "the indexer of DeepSeek's sparse attention",
    "mhc_implementation": "manifold-constrained hyper-connections",
}


def only_veomnis(field: object) -> str:
    """What to do about a field that VeOmni has and no op here; empty for any other name.

    Example:
        >>> only_veomnis("mhc_implementation")
        'In VeOmni it chooses manifold-constrained hyper-connections; no op is here for that, so leave it out'
        >>> only_veomnis("rms_norm_implementation")
        ''
    """
    chosen = _FOR_SINGLE_MODELS.get(str(field))
    return f"In VeOmni it chooses {chosen}; no op is here for that, so leave it out" if chosen else ""


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
