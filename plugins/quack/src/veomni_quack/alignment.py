"""Copies operands that QuACK's vector loads can't read, and defines custom operators inside which addresses are known.

QuACK compiles its kernels for the widest loads that a row's width allows, at most 16 bytes. CuTe raises
("Misaligned Tensor data", "Invalid strides") if an operand's address or stride is no multiple of that width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, library

from veomni_core.kernels import ALIGNMENT, aligned

_LIBRARY = library.Library("veomni_quack", "FRAGMENT")


def readable(operand: Tensor) -> Tensor:
    """``operand``, or an aligned copy if QuACK's vector loads for its row width can't read it."""
    return aligned(operand, math.gcd(ALIGNMENT, operand.shape[-1] * operand.element_size()))


def operator(schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """A custom operator, opaque to ``torch.compile``: its implementation always sees real tensors with addresses.

    Args:
        fake: Results of the same shapes, dtypes and strides, without a call of QuACK: 0.6 would compile a kernel and
            launch it on fake tensors.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    library.register_fake(f"veomni_quack::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.veomni_quack, name).default
