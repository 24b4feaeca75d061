"""How the kernels of rows are launched: tiles of rows, and persistent programs that loop over them."""

from __future__ import annotations

from dataclasses import dataclass

_REGISTERS = 65536  # of a multiprocessor


@dataclass(frozen=True)
class ForwardLaunch:
    """One program normalises a tile of ``rows`` rows, or of one group of each, with ``warps`` warps."""

    rows: int
    warps: int


@dataclass(frozen=True)
class BackwardLaunch:
    """Persistent programs that loop over tiles of rows, or of one group of them.

    Attributes:
        rows: Rows of a tile.
        warps: Warps per program.
        programs: Programs per multiprocessor.
        stages: Depth of the software pipeline: ``stages - 1`` tiles are loaded ahead.
    """

    rows: int
    warps: int
    programs: int
    stages: int

    @property
    def registers(self) -> int:
        """The most that a thread may have, so that a multiprocessor can hold all of its programs."""
        return min(255, _REGISTERS // (32 * self.warps * self.programs) // 8 * 8)
