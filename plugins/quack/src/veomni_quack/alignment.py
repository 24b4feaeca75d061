"""What QuACK asks of the place of its operands, and operators in which that can be looked at.

QuACK 0.4 compiles its kernels for the widest loads that a row's width allows, of 16 bytes at most, and CuTe's calls
raise ("Misaligned Tensor data", "Invalid strides") where an address or a stride doesn't fit these.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, library

from veomni_core.ops.memory_layout import ALIGNMENT, aligned

_LIBRARY = library.Library("veomni_quack", "FRAGMENT")


def readable(operand: Tensor) -> Tensor:
    """``operand``, or a copy of it where QuACK's loads of its width can't read it."""
    return aligned(operand, math.gcd(ALIGNMENT, operand.shape[-1] * operand.element_size()))


def operator(schema: str, implementation: Callable[..., Any]) -> Callable[..., Any]:
    """An operator that ``torch.compile`` keeps whole, so that its operands' addresses are known where it runs.

    QuACK's own operators have fakes, so the implementation takes fake tensors as well.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    library.register_fake(f"veomni_quack::{name}", implementation, lib=_LIBRARY)
    return getattr(torch.ops.veomni_quack, name).default  # type: ignore[no-any-return]
