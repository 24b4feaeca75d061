"""How the convolution is divided among programs: tables of launches, and what follows from one for a given tensor."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from veomni_ops.sizes import ceil_div
from veomni_ops.triton_gpus import multiprocessors

_REGISTERS = 65536  # of a multiprocessor


@dataclass(frozen=True)
class Launch:
    """Programs that walk along runs of positions.

    Attributes:
        channels: Channels of a program.
        step: Positions of a step. Runs are as many whole steps.
        warps: Warps of a program.
        programs: Programs of a multiprocessor at once. There are as many runs as keep all multiprocessors busy once.
        stages: Depth of the software pipeline where channels are adjacent: ``stages - 1`` steps are loaded ahead.
    """

    channels: int
    step: int
    warps: int
    programs: int
    stages: int = 1

    @property
    def registers(self) -> int:
        """The most that a thread may have, so that a multiprocessor can hold all of its programs."""
        return min(255, _REGISTERS // (32 * self.warps * self.programs) // 8 * 8)

    def of_width(self, width: int) -> Launch:
        """This launch for ``width`` taps: with half of the programs, and so twice the registers, for more than four."""
        return self if width <= 4 else replace(self, programs=max(1, self.programs // 2))

    def run(self, x: Tensor) -> int:
        """The positions of a run of ``x [B, C, S]``."""
        batch, channels, positions = x.shape
        runs = max(1, multiprocessors(x.device) * self.programs // (batch * ceil_div(channels, self.channels)))
        return ceil_div(ceil_div(positions, runs), self.step) * self.step

    def grid(self, x: Tensor) -> tuple[int]:
        """The number of programs for ``x [B, C, S]``."""
        batch, channels, positions = x.shape
        return (batch * ceil_div(channels, self.channels) * ceil_div(positions, self.run(x)),)

    def partials(self, x: Tensor, weight: Tensor) -> Tensor:
        """Room for the partial sums of all runs, ``[P, W + 1, C]`` in float32."""
        batch, channels, positions = x.shape
        runs = batch * ceil_div(positions, self.run(x))
        return x.new_empty(runs, weight.shape[1] + 1, channels, dtype=torch.float32)


# Where channels are adjacent, a thread has 4 of them, and where positions are, 8 positions of 16 bits. Of a few
# launches around these, they were the best on an H200 in bfloat16, plain and packed: 16384 positions of 8192 channels.
CHANNELS_FORWARD = Launch(channels=512, step=4, warps=4, programs=6, stages=3)
CHANNELS_BACKWARD = Launch(channels=512, step=4, warps=4, programs=4, stages=3)
POSITIONS_FORWARD = Launch(channels=8, step=128, warps=4, programs=6)
POSITIONS_BACKWARD = Launch(channels=8, step=128, warps=4, programs=8)
