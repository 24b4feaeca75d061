"""The axes of a chart: where values lie on them, and the round numbers that are written beside them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

_ROUND = (1.0, 2.0, 2.5, 5.0, 10.0)
_MARGIN = 0.05  # of the values' range, beyond each end
_LARGEST, _SMALLEST = 1e300, 1e-300  # beyond these the sizes of steps overflow


@dataclass(frozen=True)
class Scale:
    """Values from ``low`` to ``high`` lie from ``start`` to ``end``, in the drawing's units."""

    low: float
    high: float
    start: float
    end: float

    @classmethod
    def over(cls, values: Iterable[float], start: float, end: float) -> Scale:
        """Around the finite ones of ``values``, with some room at both ends."""
        finite = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
        low, high = (max(-_LARGEST, min(each, _LARGEST)) for each in (min(finite), max(finite)))
        if max(abs(low), abs(high)) < _SMALLEST:
            low = high = 0.0
        # Of one value alone, or of values that differ by rounding: else the ticks would be the digits of its rounding.
        room = _MARGIN * (high - low) if high - low > 1e-9 * max(abs(low), abs(high)) else 0.05 * abs(high) or 0.05
        return cls(low - room, high + room, start, end)

    def at(self, value: float) -> float:
        """Where ``value`` lies."""
        return self.start + (self.end - self.start) * ((value - self.low) / (self.high - self.low))

    def ticks(self, most: int, whole: bool = False) -> list[tuple[float, str]]:
        """At most ``most`` round numbers with their texts; ``whole``: no fractions."""
        size = (self.high - self.low) / most
        power = 10.0 ** math.floor(math.log10(size))
        step = power * next(each for each in _ROUND if each * power >= size * (1 - 1e-9))
        if whole:
            step = max(1.0, 5.0 * power if step == 2.5 and power == 1.0 else step)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        values = [number * step for number in range(first, last + 1)]
        return [*zip(values, _texts(values, step), strict=True)]


def _texts(values: list[float], step: float) -> list[str]:
    """The values with as many decimals as their step has; very large and very small ones with a power of ten."""
    largest = max(map(abs, values), default=0.0)
    power = math.floor(math.log10(largest) + 1e-9) if largest and not 1e-3 <= largest < 1e6 else 0
    step = step / 10.0**power
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    decimals += not math.isclose(round(step, decimals), step, rel_tol=1e-6)  # 0.25
    texts = [f"{value / 10.0**power:.{decimals}f}" + (f"e{power}" if power else "") for value in values]
    return [text if abs(value) > step * 1e-6 * 10.0**power else "0" for value, text in zip(values, texts, strict=True)]
