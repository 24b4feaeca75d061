"""In what the variants differ."""

from __future__ import annotations

from typing import NamedTuple


class Form(NamedTuple):
    """Where the gate is, what opens it, and where a result is rounded.

    Attributes:
        gate_first: ``x * opening`` is normalised; else ``opening`` multiplies what was normalised and weighted.
        sigmoid: The opening is ``sigmoid(gate)``; else ``silu(gate)``.
        rounded: The normalised value is rounded to x's dtype, and its product with the weight to the dtype that both
            have in common; else the result alone is rounded.
    """

    gate_first: bool
    sigmoid: bool
    rounded: bool
