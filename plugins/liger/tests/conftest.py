"""Where there is no GPU, Liger's kernels run in Triton's interpreter."""

from __future__ import annotations

import numpy as np
import torch
import triton.language as tl
from liger_kernel.ops import cross_entropy, geglu, rms_norm
from triton.runtime.interpreter import TensorHandle

from veomni_conformance.triton_interpreter import mend_interpreter


def _elementwise(function):
    """Of libdevice the interpreter has names alone, whose calls give nothing."""
    return lambda x: tl.tensor(TensorHandle(function(x.handle.data), x.handle.dtype), x.type)


if not torch.cuda.is_available():
    mend_interpreter()
    rms_norm.rsqrt = _elementwise(lambda x: 1 / np.sqrt(x))
    geglu.tanh = cross_entropy.tanh = _elementwise(np.tanh)
