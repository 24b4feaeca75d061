"""Mends Triton's interpreter, in which kernels are checked without a GPU.

Written against Triton 3.6. Bugs of the interpreter: NumPy 2.4 rejects its loop bounds; it truncates float32 to bfloat16
where GPUs round; it multiplies bfloat16 as integers, and rounds a row of a product by its place, as NumPy's float32
products do; it has no atomic add of bfloat16; it passes a float argument as a
Python float; its minimum is NaN where a GPU returns the other number; two threads can't launch kernels at once.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from typing import Any

import numpy as np
import torch

from veomni_core.errors import HostError


def interpret_triton() -> None:
    """Have Triton's interpreter, mended, run all kernels that this process imports from now on.

    Raises:
        HostError: Triton is not installed, or was imported without ``TRITON_INTERPRET=1``, which it reads only then.
    """
    if "triton" in sys.modules and not _is_interpreting():
        raise HostError(
            "Triton's interpreter was asked for, but triton is imported already, without it: set TRITON_INTERPRET=1 in "
            "the environment"
        )
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        mend_interpreter()
    except ImportError as error:
        raise HostError(f"Triton's interpreter was asked for, but triton cannot be imported: {error}") from error


def _is_interpreting() -> bool:
    """Whether the language's own functions, which Triton compiles when it is imported, are the interpreter's."""
    from triton.language import standard
    from triton.runtime.interpreter import InterpretedFunction

    return isinstance(standard.sum, InterpretedFunction)


@functools.cache
def mend_interpreter() -> None:
    """Patch Triton's interpreter in this process. It runs kernels that are imported with ``TRITON_INTERPRET=1`` set.

    Raises:
        ImportError: Triton is not installed.
    """
    from triton.runtime import interpreter

    _mend_numbers(interpreter)
    _mend_extremes(interpreter)
    _launch_one_at_a_time(interpreter)


def _mend_numbers(interpreter: Any) -> None:
    import triton.language as tl
    from triton._C.libtriton import ir

    convert_float, implicit_cvt = interpreter._convert_float, interpreter._implicit_cvt
    patch_tensor, create_dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot
    atomic_rmw = interpreter.InterpreterBuilder.create_atomic_rmw

    def convert_to_nearest(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source, target) == (tl.float32, tl.bfloat16):  # ties to even, as on GPUs
            return _rounded(data)
        return convert_float(data, source, target, rounding)

    def convert_floats_too(argument: Any) -> Any:
        # On a GPU a float argument is a float32 tensor, and kernels call methods of it.
        if isinstance(argument, float):
            handle = interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32)
            return tl.tensor(handle, tl.float32)
        return implicit_cvt(argument)

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        # A loop up to a run-time value calls int() on an array of one element, which NumPy 2.4 refuses.
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle(_wide(handle.data), tl.float32)

    def multiply(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        a, b = widened(a), widened(b)
        if not {a.dtype.scalar, b.dtype.scalar} <= {tl.float32, tl.float16}:
            return create_dot(self, a, b, d, *rest)
        product = np.matmul(a.data, b.data, dtype=np.float64).astype(d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    def add_atomically(self: Any, operation: Any, ptr: Any, val: Any, mask: Any, *order: Any) -> Any:
        if val.dtype.scalar != tl.bfloat16 or operation != ir.ATOMIC_OP.FADD:
            return atomic_rmw(self, operation, ptr, val, mask, *order)
        places = interpreter.TensorHandle(ptr.data, tl.pointer_type(tl.bfloat16))
        before = self.create_masked_load(places, mask, None, None, None, False)
        memory = interpreter._interpreter
        # One after the other, since an address may occur twice.
        for place, value in zip(ptr.data[mask.data], val.data[mask.data], strict=True):
            address, one = np.array([place]), np.ones(1, dtype=bool)
            found = memory.load(address, one, np.zeros(1, dtype=np.uint16), np.dtype(np.uint16))
            memory.store(address, _rounded(_wide(found) + _wide(np.array([value]))), one)
        return before

    interpreter._convert_float = convert_to_nearest
    interpreter._implicit_cvt = convert_floats_too
    interpreter._patch_lang_tensor = patch_tensor_and_index
    interpreter.InterpreterBuilder.create_dot = multiply
    interpreter.InterpreterBuilder.create_atomic_rmw = add_atomically


def _mend_extremes(interpreter: Any) -> None:
    """Make minimum, maximum and clamp propagate NaN only if the kernel passes ``propagate_nan``, as on a GPU."""
    from triton._C.libtriton import ir

    builder = interpreter.InterpreterBuilder

    def clamp(self: Any, values: Any, low: Any, high: Any, propagate_nan: Any) -> Any:
        if propagate_nan == ir.PROPAGATE_NAN.ALL:
            return self.create_minimumf(self.create_maximumf(values, low), high)
        return self.create_minnumf(self.create_maxnumf(values, low), high)

    builder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)
    builder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
    builder.create_clampf = clamp


def _launch_one_at_a_time(interpreter: Any) -> None:
    """A launch patches the language for the whole process, and two threads would take each other's patches back."""
    launch, lock = interpreter.GridExecutor.__call__, threading.RLock()

    def launch_alone(self: Any, *args: Any, **kwargs: Any) -> Any:
        with lock:
            return launch(self, *args, **kwargs)

    interpreter.GridExecutor.__call__ = launch_alone


def _wide(bits: Any) -> Any:
    """bfloat16 numbers, which the interpreter stores as uint16 bits, in float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _rounded(numbers: Any) -> Any:
    """float32 numbers rounded to bfloat16, as uint16 bits."""
    return torch.from_numpy(np.ascontiguousarray(numbers)).bfloat16().view(torch.uint16).numpy()
