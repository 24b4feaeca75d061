"""Mends Triton 3.6's interpreter, in which Liger's kernels run where there is no GPU."""

from __future__ import annotations

import numpy as np
import torch
import triton.language as tl
from liger_kernel.ops import cross_entropy, geglu, rms_norm
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

_convert_float = interpreter._convert_float
_implicit_cvt = interpreter._implicit_cvt
_patch_tensor = interpreter._patch_lang_tensor


def _convert_floats_too(argument):
    # A float argument is a float32 tensor on a GPU, and Liger calls its methods; the interpreter leaves it a float.
    if isinstance(argument, float):
        return tl.tensor(TensorHandle(np.array([argument], dtype=np.float32), tl.float32), tl.float32)
    return _implicit_cvt(argument)


def _patch_tensor_and_index(tensor, scope):
    _patch_tensor(tensor, scope)
    # Loops up to a run-time value call int() on an array of one element, which NumPy 2.4 refuses.
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


def _convert_to_nearest(data, source, target, rounding):
    # The interpreter cuts float32 off to bfloat16; GPUs round to the nearest, ties to even.
    if (source, target) == (tl.float32, tl.bfloat16):
        return torch.from_numpy(np.ascontiguousarray(data)).bfloat16().view(torch.uint16).numpy()
    return _convert_float(data, source, target, rounding)


def _elementwise(function):
    """Of libdevice the interpreter has names alone, whose calls give nothing."""
    return lambda x: tl.tensor(TensorHandle(function(x.handle.data), x.handle.dtype), x.type)


if not torch.cuda.is_available():
    interpreter._convert_float = _convert_to_nearest
    interpreter._implicit_cvt = _convert_floats_too
    interpreter._patch_lang_tensor = _patch_tensor_and_index
    rms_norm.rsqrt = _elementwise(lambda x: 1 / np.sqrt(x))
    geglu.tanh = cross_entropy.tanh = _elementwise(np.tanh)
