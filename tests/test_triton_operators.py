"""Operators that the interpreter is spared give its own results, bit for bit."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from fast_interpreter.operators import DirectOperators
from veomni_conformance.triton_interpreter import mend_interpreter

if not torch.cuda.is_available():
    mend_interpreter()

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the kernels themselves")

SIGNS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "lt", "le", "gt", "ge", "eq", "ne", "and", "or", "xor")
DTYPES = {"float32": tl.float32, "float64": tl.float64, "int32": tl.int32, "int64": tl.int64, "int1": tl.int1}
NUMBERS = (3, -2, 0, 2.5, -0.0, 1e-40, 1e300, float("inf"), 2**40, True)


@triton.jit
def _kernel(x):
    tl.store(x, 1)


@pytest.fixture
def interpreter():
    """The interpreter's module, with the language patched as in a launch."""
    from triton.runtime import interpreter

    scope = interpreter._patch_lang(_kernel.fn)
    yield interpreter
    scope.restore()


ORIGINALS = {f"__{side}{sign}__": getattr(tl.tensor, f"__{side}{sign}__") for sign in SIGNS for side in ("", "r")} | {
    "__getitem__": tl.tensor.__getitem__,
    "to": tl.tensor.to,
}


operators = functools.cache(DirectOperators)


@functools.cache
def tensor(interpreter, dtype, shape, transposed=False):
    """Values of both signs and no zero, since integers are divided by them; a scalar for ``()``."""
    generator = np.random.default_rng(len(shape))
    array = np.dtype("bool" if dtype is tl.int1 else str(dtype).replace("fp", "float"))
    values = generator.choice([-7, -3, -1, 1, 2, 5], size=shape or (1,)).astype(array)
    values = values * (array.type(1.25) if array.kind == "f" else array.type(1))
    values = np.asfortranarray(values) if transposed else values
    return tl.tensor(interpreter.TensorHandle(values, dtype), tl.block_type(dtype, list(shape)) if shape else dtype)


def outcome(operator, *operands):
    """What is computed: the bytes with their dtype and shape, and the types that Triton gives them."""
    try:
        found = operator(*operands)
    except Exception as error:
        return type(error), str(error)
    data = found.handle.data
    # Sums of an array follow its order in memory; from pointers nothing is summed.
    order = None if found.dtype.is_ptr() else (data.flags.f_contiguous, data.flags.c_contiguous)
    return data.tobytes(), data.dtype, data.shape, order, str(found.type), str(found.dtype), found.handle.dtype


def compared(interpreter, name, *operands):
    """Whether ``name`` was computed directly; both results are alike."""
    taken = []

    def slow(*args, **options):
        taken.append(name)
        return ORIGINALS[name](*args, **options, _semantic=interpreter.interpreter_semantic)

    direct = outcome(operators(interpreter).of(name, slow), *operands)
    is_direct = not taken
    assert direct == outcome(slow, *operands), (name, operands)
    return is_direct


SHAPES = ((), (4,), (4, 1), (1, 4), (4, 4), (2, 1, 4))


@pytest.mark.parametrize("sign", SIGNS)
@pytest.mark.parametrize("dtype", DTYPES)
@np.errstate(all="ignore")
def test_operators_of_two_tensors(sign, dtype, interpreter):
    direct = 0
    for left, right, other in itertools.product(SHAPES, SHAPES, DTYPES.values()):
        for transposed in (False, True) if left == (4, 4) else (False,):
            x = tensor(interpreter, DTYPES[dtype], left, transposed)
            direct += compared(interpreter, f"__{sign}__", x, tensor(interpreter, other, right))
    plain = {"and": ("int1",), "or": ("int1",), "xor": ("int1",), "truediv": ("float32", "float64")}
    plain |= dict.fromkeys(("floordiv", "mod"), ("int32", "int64"))
    assert bool(direct) == (dtype in plain.get(sign, ("float32", "float64", "int32", "int64")))


@pytest.mark.parametrize("dtype", DTYPES)
@np.errstate(all="ignore")
def test_operators_of_a_tensor_and_a_number(dtype, interpreter):
    directly = set()
    for name, number, shape in itertools.product(ORIGINALS, NUMBERS, ((), (4, 4))):
        for given in (number, tl.constexpr(number)) if name.endswith("__") else ():
            x = tensor(interpreter, DTYPES[dtype], shape)
            if name != "__getitem__" and compared(interpreter, name, x, given):
                directly.add(number)
    plain = {"float32": {3, -2, 0, 2.5, -0.0, float("inf")}, "int32": {3, -2, 0}, "int1": set()}
    assert directly == {"float64": plain["float32"], "int64": plain["int32"], **plain}[dtype]


@pytest.mark.parametrize("element", [tl.float32, tl.bfloat16, tl.int1, tl.int64], ids=str)
def test_sums_of_pointers_and_offsets(element, interpreter):
    directly = []
    for left, right, offset in itertools.product(SHAPES, SHAPES, (tl.int32, tl.int64, tl.float32)):
        places = np.arange(4096, 4096 + 8 * max(1, *left, 1), 8, dtype=np.uint64)
        values = np.broadcast_to(places[:1], left or (1,)).copy()
        kind = tl.pointer_type(element)
        of_block = tl.block_type(kind, list(left)) if left else kind
        pointers = tl.tensor(interpreter.TensorHandle(values, kind), of_block)
        for name in ("__add__", "__radd__"):
            directly.append(compared(interpreter, name, pointers, tensor(interpreter, offset, right)))
            directly.append(compared(interpreter, name, pointers, 5))
    assert any(directly) and not all(directly)


@pytest.mark.parametrize("slices", [(slice(None), None), (None, slice(None)), (None, slice(None), None), (0,)], ids=str)
def test_new_axes(slices, interpreter):
    for shape in ((), (4,), (4, 2)):
        direct = compared(interpreter, "__getitem__", tensor(interpreter, tl.float32, shape), slices)
        assert direct == (bool(shape) and slices != (0,))


def test_a_cast_to_the_same_dtype(interpreter):
    x = tensor(interpreter, tl.float32, (4,))
    assert compared(interpreter, "to", x, tl.float32) and not compared(interpreter, "to", x, tl.int32)
