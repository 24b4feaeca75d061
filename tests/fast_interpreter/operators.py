"""Has Triton's interpreter compute the operators of plain tensors directly in NumPy, bit for bit what it computes.

Written against Triton 3.6. For one sum the interpreter calls forty functions, which promote, broadcast and check both
operands; most operands need none of it. What is not plain (other dtypes on the two sides, half precision, which NumPy
lacks or rounds otherwise, and whatever raises) takes the interpreter's own way.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

Operator = Callable[..., Any]
_SMALLEST, _LARGEST = 2.0**-126, (2.0 - 2.0**-23) * 2.0**127  # a number beyond these is a float64 in Triton


def _quotient(x: Any, y: Any) -> Any:
    return (x - np.fmod(x, y)) // y  # rounds towards zero, as Triton does and NumPy doesn't


_ARITHMETIC = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
_OF_INTEGERS = {"floordiv": _quotient, "mod": np.fmod}
_COMPARISONS = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}
_OF_MASKS = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


class DirectOperators:
    """The methods of ``tl.tensor`` that are computed directly, by name.

    Args:
        interpreter: the module ``triton.runtime.interpreter``.
    """

    def __init__(self, interpreter: Any) -> None:
        import triton.language as tl

        self._tl, self._handle = tl, interpreter.TensorHandle
        self._semantic = interpreter.interpreter_semantic
        floats = {id(tl.float32): np.dtype(np.float32), id(tl.float64): np.dtype(np.float64)}
        integers = {id(tl.int32): np.dtype(np.int32), id(tl.int64): np.dtype(np.int64)}
        self._numbers, masks = {**floats, **integers}, {id(tl.int1): np.dtype(np.bool_)}
        self._integers = integers
        self._constants: dict[tuple[Any, int], Any] = {}
        kinds: list[tuple[dict[str, Any], dict[int, Any]]] = [
            (_ARITHMETIC, self._numbers),
            ({"truediv": np.divide}, floats),
            (_OF_INTEGERS, integers),
            (_COMPARISONS, self._numbers),
            (_OF_MASKS, masks),
        ]
        self._direct: dict[str, Callable[[Operator], Operator]] = {"__getitem__": self._with_new_axes, "to": _cast}
        for functions, arrays in kinds:
            for name, function in functions.items():
                compares = functions is _COMPARISONS
                self._direct[f"__{name}__"] = self._operator(function, arrays, compares, swapped=False)
                self._direct[f"__r{name}__"] = self._operator(function, arrays, compares, swapped=True)
        for name in ("__add__", "__radd__"):
            self._direct[name] = self._with_pointers(self._direct[name])

    def of(self, name: str, slow: Operator) -> Operator:
        """The method ``name`` of a tensor; ``slow`` is the interpreter's, which takes what is not plain."""
        return self._direct[name](slow) if name in self._direct else slow

    def _operator(
        self, function: Callable[[Any, Any], Any], arrays: dict[int, Any], compares: bool, swapped: bool
    ) -> Callable[[Operator], Operator]:
        tl, operand, made, integers = self._tl, self._operand, self._made, self._integers
        tensor, block = tl.tensor, tl.block_type

        def direct(slow: Operator) -> Operator:
            def call(self: Any, other: Any) -> Any:
                dtype = self.dtype
                array = arrays.get(id(dtype))
                if array is None:
                    return slow(self, other)
                if type(other) is not tensor:
                    given, other = other, operand(other, dtype)
                    if other is None:
                        return slow(self, given)
                handle, widened = self.handle, other.dtype is not dtype
                x, y, of_x, of_y = handle.data, other.handle.data, self.type, other.type
                if widened and not (id(dtype) in integers and id(other.dtype) in integers):
                    return slow(self, other)
                if x.dtype is not array or y.dtype is not arrays[id(other.dtype)]:
                    return slow(self, other)
                if type(of_x) is not block:
                    of_result, plain = of_y, type(of_y) is not block or y.flags.c_contiguous
                elif type(of_y) is not block:
                    of_result, plain = of_x, x.flags.c_contiguous
                else:
                    of_result, plain = (of_x if of_x.shape is of_y.shape else None), True
                # A scalar beside a block in another order of memory: the interpreter's result has its own order.
                if not plain:
                    return slow(self, other)
                if of_result is None:
                    try:
                        result = function(y, x) if swapped else function(x, y)
                    except ValueError:  # shapes that can't be broadcast
                        return slow(self, other)
                    of_result = block(dtype, result.shape)
                else:
                    result = function(y, x) if swapped else function(x, y)
                if compares or widened:
                    of_element = tl.int1 if compares else tl.int64
                    of_result = of_result.with_element_ty(of_element) if type(of_result) is block else of_element
                return tensor(made(result, tl.int64 if widened else handle.dtype), of_result)

            return call

        return direct

    def _with_pointers(self, direct: Callable[[Operator], Operator]) -> Callable[[Operator], Operator]:
        """Sums of pointers and offsets too."""
        tl, integers, operand, made = self._tl, self._integers, self._operand, self._made
        tensor, pointer, block = tl.tensor, tl.pointer_type, tl.block_type

        def both(slow: Operator) -> Operator:
            of_numbers = direct(slow)

            def call(self: Any, other: Any) -> Any:
                if type(self.dtype) is not pointer:
                    return of_numbers(self, other)
                offset = other if type(other) is tensor else operand(other, tl.int32)
                if offset is None or id(offset.dtype) not in integers:
                    return slow(self, other)
                handle, of_self, of_offset = self.handle, self.type, offset.type
                width = max(1, self.dtype.element_ty.primitive_bitwidth // 8)
                try:
                    places = handle.data + width * offset.handle.data.astype(np.uint64)
                except ValueError:
                    return slow(self, other)
                if type(of_offset) is block and (type(of_self) is not block or of_self.shape is not of_offset.shape):
                    of_self = block(self.dtype, places.shape)
                return tensor(made(places, handle.dtype), of_self)

            return call

        return both

    def _with_new_axes(self, slow: Operator) -> Operator:
        tensor, block, made, every = self._tl.tensor, self._tl.block_type, self._made, slice(None)

        def call(self: Any, slices: Any) -> Any:
            if type(slices) is not tuple or type(self.type) is not block:
                return slow(self, slices)
            for each in slices:
                if each is not None and each != every:
                    return slow(self, slices)
            handle = self.handle
            data = handle.data[slices]
            return tensor(made(data, handle.dtype), block(self.dtype, data.shape))

        return call

    def _made(self, data: Any, dtype: Any) -> Any:
        """A handle. That its array fits its dtype needs no check here."""
        handle = object.__new__(self._handle)
        handle.data, handle.dtype, handle.attr = data, dtype, {}
        return handle

    def _operand(self, number: Any, dtype: Any) -> Any:
        """The constant of a Python number beside a tensor of ``dtype``; ``None`` if it would change the dtype."""
        if type(number) is self._tl.constexpr:
            number = number.value
        if not self._keeps_dtype(number, dtype):
            return None
        if number == 0:  # 0.0 and -0.0 would be one key
            return self._semantic.scalar_constant(number, dtype)
        key = number, id(dtype)
        if key not in self._constants:
            self._constants[key] = self._semantic.scalar_constant(number, dtype)
        return self._constants[key]

    def _keeps_dtype(self, number: Any, dtype: Any) -> bool:
        if type(number) is int:
            return id(dtype) in self._numbers and -(2**31) <= number < 2**31
        if type(number) is not float or id(dtype) in self._integers or id(dtype) not in self._numbers:
            return False
        return _SMALLEST <= abs(number) <= _LARGEST or abs(number) in (0.0, math.inf)


def _cast(slow: Operator) -> Operator:
    """``x.to(dtype)``, which is ``x`` if it is of that dtype."""

    def call(self: Any, *args: Any, **options: Any) -> Any:
        return self if not options and len(args) == 1 and args[0] is self.dtype else slow(self, *args, **options)

    return call
