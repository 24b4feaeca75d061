"""Mends Triton 3.6's interpreter, in which kernels run where there is no GPU."""

from __future__ import annotations

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_patch_tensor = interpreter._patch_lang_tensor
_convert_float = interpreter._convert_float
_create_dot = interpreter.InterpreterBuilder.create_dot


def _patch_tensor_and_index(tensor, scope):
    _patch_tensor(tensor, scope)
    # Loops up to a run-time value call int() on an array of one element, which NumPy 2.4 refuses.
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


def _convert_to_nearest(data, source, target, rounding):
    # The interpreter cuts float32 off to bfloat16; GPUs round to the nearest, ties to even.
    if (source, target) == (tl.float32, tl.bfloat16):
        rounded = torch.from_numpy(np.ascontiguousarray(data)).bfloat16()
        return rounded.view(torch.uint16).numpy()
    return _convert_float(data, source, target, rounding)


def _widened(handle):
    # The interpreter holds bfloat16 as its bits, and would multiply those as integers.
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    wide = (handle.data.astype(np.uint32) << 16).view(np.float32)
    return interpreter.TensorHandle(wide, tl.float32)


def _dot_of_values(self, a, b, *rest):
    return _create_dot(self, _widened(a), _widened(b), *rest)


interpreter._patch_lang_tensor = _patch_tensor_and_index
interpreter._convert_float = _convert_to_nearest
interpreter.InterpreterBuilder.create_dot = _dot_of_values
