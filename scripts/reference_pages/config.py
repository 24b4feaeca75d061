"""docs/reference/fields.md: the config's fields with their kernels, presets, and old names of kernels."""

from __future__ import annotations

from collections.abc import Iterator

from reference_pages.markdown import table
from reference_pages.repository import registry
from veomni_core.descriptions.kernel_spec import EAGER
from veomni_core.descriptions.op_spec import OpSpec
from veomni_core.planning.choice import AUTO
from veomni_core.planning.config import known_presets

_HEAD = """# Fields and presets

The fields of `model.ops_implementation`, one per op; [the config](config.md) says what a value may be. A plugin's op is
configurable as soon as it is installed. Behind each op's link is what its kernels need.
"""


def page() -> str:
    """The page's text."""
    fields = table(("field", "op and variants", "values that exist"), map(_field, _ops()))
    lines = [_HEAD, *fields, "", "## Presets\n", *table(("preset", "fills in"), _presets()), "", "## Old values\n"]
    lines += ["They are read as what they are called now, with a warning:\n"]
    return "\n".join([*lines, *table(("field of", "old value", "read as"), _old_values()), ""])


def _ops() -> Iterator[OpSpec]:
    yield from registry().ops.values()


def _field(op: OpSpec) -> tuple[str, str, str]:
    """An op's row. A kernel without a provider is reserved, and can't be chosen yet."""
    aliases = {variant: f"{variant} (alias {alias})" for alias, variant in op.variant_aliases.items()}
    variants = ", ".join(aliases.get(variant, variant) for variant in op.variants)
    values = (EAGER, *(name for name, provider in op.published.items() if provider))
    linked = f"[{op.name}](kernels.md#{op.name})"
    return (
        f"`{op.config_field}`",
        linked if variants == "standard" else f"{linked}: {variants}",
        " ".join(f"`{value}`" for value in values),
    )


def _presets() -> Iterator[tuple[str, str]]:
    """A preset that has one value for every field says it once."""
    for name, values in known_presets(registry()).items():
        filled = {*values.values()}
        every = f"`{filled.pop()}` in every field" if name in (AUTO, EAGER) and len(filled) == 1 else ""
        yield f"`{name}`", every or ", ".join(f"`{field}: {value}`" for field, value in values.items())


def _old_values() -> Iterator[tuple[str, str, str]]:
    for op in _ops():
        for old, new in op.legacy_values.items():
            yield f"[{op.name}](kernels.md#{op.name})", f"`{old}`", f"`{new}`"
