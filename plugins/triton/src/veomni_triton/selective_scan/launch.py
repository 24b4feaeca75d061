"""How many channels and tokens programs take at a time."""

from __future__ import annotations

from dataclasses import dataclass

from veomni_ops.sizes import power_of_two

CHUNK = 64  # tokens from one saved state to the next
UNROLLED = 4  # tokens of a sub-block, at most. States of one column leave room for 64: these compile for six minutes


@dataclass(frozen=True)
class Launch:
    """Tiles of one kernel, whose programs are one warp each: then no sum waits for other warps.

    Attributes:
        channels: of a program.
        numbers: of the states that a program holds at once, at most: tokens of a sub-block times numbers of a state.
    """

    channels: int
    numbers: int

    def tokens(self, state_width: int) -> int:
        """Of a sub-block, for states so wide."""
        return min(UNROLLED, max(1, self.numbers // (self.channels * power_of_two(state_width))))


OUTPUTS = Launch(channels=32, numbers=32 * 16 * 4)
GRADIENTS = Launch(channels=32, numbers=32 * 16 * 2)  # with more, threads run out of registers
