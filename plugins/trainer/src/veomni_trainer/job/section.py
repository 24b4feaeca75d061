"""What the sections of a job have in common, and the types of their values."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

_SCIENTIFIC = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")


class Section(BaseModel):
    """A part of a job. Unknown keys, and values of another type than declared, are errors.

    The text below a key is its description.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)


def _read_scientific(value: Any) -> Any:
    """Read ``1e-3`` as a number, in mappings and lists too: YAML 1.1 takes it for text, since it has no point."""
    if isinstance(value, dict):
        return {key: _read_scientific(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_read_scientific(each) for each in value]
    return float(value) if isinstance(value, str) and _SCIENTIFIC.fullmatch(value) else value


Number = Annotated[float, BeforeValidator(_read_scientific), Field(allow_inf_nan=False)]
Options = Annotated[dict[str, Any], BeforeValidator(_read_scientific)]
