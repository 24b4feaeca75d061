"""Copies operands that QuACK's vector loads can't read; operators do, since inside them addresses are known.

QuACK compiles its kernels for the widest loads that a row's width allows, at most 16 bytes. CuTe raises
("Misaligned Tensor data", "Invalid strides") if an operand's address or stride is no multiple of that width.
"""

from __future__ import annotations

import math

from torch import Tensor

from veomni_core.kernels import ALIGNMENT, aligned


def readable(operand: Tensor) -> Tensor:
    """``operand``, or an aligned copy if QuACK's vector loads for its row width can't read it."""
    return aligned(operand, math.gcd(ALIGNMENT, operand.shape[-1] * operand.element_size()))
