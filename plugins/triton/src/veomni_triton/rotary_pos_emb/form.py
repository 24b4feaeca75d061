"""Which rotation a variant is, as the kernel is told it."""

from __future__ import annotations

from typing import NamedTuple


class Form(NamedTuple):
    """Where the pairs of a head's R rotated dimensions are, and which way they turn.

    Attributes:
        reads_neighbours: The pair i is read from dimensions ``2i`` and ``2i + 1``, else from ``i`` and ``i + R/2``.
        writes_neighbours: It is written to ``2i`` and ``2i + 1``, else to ``i`` and ``i + R/2``.
        last: The last R dimensions are rotated, else the first R.
        backwards: The pairs turn by the negative angle.
    """

    reads_neighbours: bool = False
    writes_neighbours: bool = False
    last: bool = False
    backwards: bool = False

    def transposed(self) -> Form:
        """The form of the gradient: what was written is read, and turned back."""
        return Form(self.writes_neighbours, self.reads_neighbours, self.last, not self.backwards)
