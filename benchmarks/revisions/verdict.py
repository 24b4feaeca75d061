"""What pairs of figures of two revisions say: a loss, a gain, neither, or too little to tell."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

LIMIT = 1.03  # a head that takes more than this share of the base's time or memory has lost
FEWEST_PAIRS = 5
_OUTSIDE = 1 / 16  # how often an interval may miss the median; with the fewest pairs, the whole range does


class Verdict(Enum):
    """Where the interval of a ratio lies."""

    LOSS = "loss"  # all of it beyond the limit
    GAIN = "gain"  # all of it beyond the limit, the other way round
    SAME = "no loss"  # none of it beyond the limit
    UNCLEAR = "unclear"  # across the limit, or of too few pairs


@dataclass(frozen=True)
class Ratio:
    """The head's figure as a share of the base's: the median over pairs, and an interval for the true median."""

    median: float
    low: float
    high: float
    pairs: int

    @property
    def verdict(self) -> Verdict:
        if self.pairs < FEWEST_PAIRS:
            return Verdict.UNCLEAR
        if self.low > LIMIT:
            return Verdict.LOSS
        if self.high < 1 / LIMIT:
            return Verdict.GAIN
        return Verdict.SAME if self.high <= LIMIT else Verdict.UNCLEAR

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


def ratio(base: Sequence[float], head: Sequence[float]) -> Ratio:
    """Compare figures that were taken in pairs.

    The interval is that of the sign test: from the k-th smallest ratio to the k-th largest. It holds for noise of any
    distribution, as long as pairs are independent of each other. Of five to eight pairs it is the whole range, and with
    more of them outliers count no longer.
    """
    ratios = sorted(_share(mine, before) for before, mine in zip(base, head, strict=True))
    k = _rank(len(ratios))
    return Ratio(statistics.median(ratios), ratios[k - 1], ratios[-k], len(ratios))


def _share(head: float, base: float) -> float:
    if base == 0:  # bytes of a call that holds nothing
        return 1.0 if head == 0 else math.inf
    return head / base


def _rank(pairs: int) -> int:
    """The largest ``k`` with which the interval misses the median often enough; 1 where even the range does."""
    below, k = 1.0, 1  # the number of ways in which fewer than k of the pairs lie on one side
    while 2 * (below + math.comb(pairs, k)) <= _OUTSIDE * 2**pairs:
        below += math.comb(pairs, k)
        k += 1
    return k
