"""Makes Triton's interpreter several times as fast, without a change of what it computes.

Written against Triton 3.6. Where it spends its time: it patches the language for every device function, builds the name
of every block type, checks every integer sum for overflow, makes every constant anew, compares the types and shapes of
operands one by one where they are the same objects, and sorts element by element.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from typing import Any

import numpy as np

from fast_interpreter.operators import DirectOperators


def quicken(interpreter: Any) -> None:
    """Patch the module ``triton.runtime.interpreter``, and the language's types and semantic that it uses."""
    _quicken_patching(interpreter)
    _quicken_types(interpreter)
    _quicken_operands(interpreter)
    _quicken_sorting(interpreter)
    # The interpreter checks every integer sum for overflow, but would only report it with ``debug``, which is off.
    interpreter.interpreter_builder.options = dataclasses.replace(
        interpreter.interpreter_builder.options, sanitize_overflow=False
    )


def _quicken_patching(interpreter: Any) -> None:
    """List the language's builtins once, and patch them once per launch instead of once per called function."""
    import triton.language as tl

    patch_lang, direct = interpreter._patch_lang, DirectOperators(interpreter)
    patched: set[int] = set()
    checking = tl.core.builtin(int).__code__  # of the functions that only check that they were given the semantic

    @functools.cache
    def builtins_of(package: Any) -> list[tuple[str, Any]]:
        return [(name, member) for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]

    @functools.cache
    def interpreted(package: Any, name: str, member: Any, builder: Any) -> Any:
        semantic = interpreter.TritonSemantic(builder)
        if getattr(member, "__code__", None) is checking:
            member = member.__wrapped__

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return member(*args, **kwargs)

        return direct.of(name, call) if package is tl.tensor else call

    def patch_attr(package: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        scope.set_attr(package, name, interpreted(package, name, member, builder))

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        for name, member in builtins_of(package):
            patch_attr(package, name, member, builder, scope)

    class Launch(interpreter._LangPatchScope):  # type: ignore[misc, name-defined]
        """The patches of one launch. The functions that it calls need no patching any more."""

        def __init__(self, scope: Any, languages: set[int]) -> None:
            super().__init__()
            self._changes, self._languages = scope._changes, languages
            patched.update(languages)

        def restore(self) -> None:
            super().restore()
            patched.difference_update(self._languages)

    @functools.cache
    def languages_of(function: Any) -> frozenset[int]:
        return frozenset(id(value) for value in function.__globals__.values() if value in (tl, tl.core))

    def patch_lang_once(function: Any) -> Any:
        missing = languages_of(function) - patched
        if patched and not missing:
            return interpreter._LangPatchScope()
        return Launch(patch_lang(function), set(missing))

    interpreter._patch_attr, interpreter._patch_builtin = patch_attr, patch_builtin
    interpreter._patch_lang = patch_lang_once


def _quicken_types(interpreter: Any) -> None:
    """Cache the type of each shape and the NumPy dtype of each element type; compare shapes as tuples of integers."""
    import triton.language as tl
    from triton._utils import validate_block_shape

    np_dtype, same_dtype = interpreter._get_np_dtype, tl.dtype.__eq__
    scalar_shape = tl.core.tuple([]), tl.constexpr(1)

    @functools.cache
    def block_shape(sizes: tuple[int, ...]) -> tuple[Any, int, tuple[Any, Any]]:
        if not sizes:
            raise TypeError("0d block_type is forbidden")
        tensor_shape = tl.core.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))
        return tl.core.tuple(sizes), validate_block_shape(sizes), tensor_shape

    def create_block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])
        self.element_ty, (self.shape, self.numel, self.tensor_shape) = element_ty, block_shape(sizes)

    def with_element_type(self: Any, element_ty: Any) -> Any:
        made = object.__new__(tl.block_type)
        made.element_ty, made.shape, made.numel = element_ty, self.shape, self.numel
        made.tensor_shape = self.tensor_shape
        return made

    def same_block(self: Any, other: Any) -> bool:
        if not isinstance(other, tl.block_type):
            return False
        return self.shape.values == other.shape.values and bool(self.element_ty == other.element_ty)

    def create_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.tensor_shape if type.is_block() else scalar_shape

    @functools.cache
    def np_dtype_of(scalar: Any) -> Any:
        return np_dtype(scalar)

    def np_dtype_of_elements(type: Any) -> Any:
        return np_dtype(type) if isinstance(type.scalar, tl.pointer_type) else np_dtype_of(type.scalar)

    def fits(array: Any, dtype: Any) -> bool:
        return isinstance(dtype, tl.pointer_type) or bool(array.itemsize * 8 <= max(8, dtype.primitive_bitwidth))

    tl.block_type.__init__, tl.block_type.__eq__ = create_block, same_block
    tl.block_type.name = property(lambda self: f"<{tuple(self.shape.values)}, {self.element_ty}>")
    tl.block_type.with_element_ty = with_element_type
    tl.dtype.__eq__ = lambda self, other: self is other or same_dtype(self, other)
    tl.tensor.__init__ = create_tensor
    interpreter._get_np_dtype, interpreter._validate_np_data_size = np_dtype_of_elements, fits


def _quicken_operands(interpreter: Any) -> None:
    """Make each constant once, and pass on operands that are of one type and shape already."""
    import triton.language as tl

    semantic = interpreter.TritonSemantic
    check_operands, broadcast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value
    make_constant, cast, to_tensor = semantic.scalar_constant, semantic.cast, semantic.to_tensor

    @functools.cache
    def constant_of(self: Any, kind: Any, sign: float, value: Any, dtype: Any) -> Any:
        made = make_constant(self, value, dtype)
        made.handle.data.flags.writeable = False  # whatever wrote into it would change every kernel's constant
        return made

    def constant(self: Any, value: Any, dtype: Any) -> Any:
        kind: Any = type(value)  # 1, 1.0 and True are equal, as are 0.0 and -0.0, and so one key without kind and sign
        if dtype is None or kind not in (int, float, bool):
            return make_constant(self, value, dtype)
        return constant_of(self, kind, math.copysign(1.0, value), value, dtype)

    def spread(tensor: Any, sizes: list[int]) -> Any:
        if tensor.type.shape.values == sizes:
            return tensor
        data = np.broadcast_to(tensor.handle.data, sizes)
        handle = interpreter.TensorHandle(data, tensor.handle.dtype.scalar)
        return tl.tensor(handle, tl.block_type(tensor.dtype, sizes))

    def broadcast_unlike(self: Any, lhs: Any, rhs: Any) -> Any:
        of_lhs, of_rhs = lhs.type, rhs.type
        if of_lhs.is_block() and of_rhs.is_block():
            if of_lhs.shape is of_rhs.shape:
                return lhs, rhs
            sizes = of_lhs.shape.values, of_rhs.shape.values
            if len(sizes[0]) == len(sizes[1]):
                wider = [right if left == 1 else left for left, right in zip(*sizes, strict=True)]
                if all(size in (1, wide) for size, wide in zip(sizes[1], wider, strict=True)):
                    return spread(lhs, wider), spread(rhs, wider)
        return broadcast(self, lhs, rhs)

    def check_unlike(
        self: Any,
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> Any:
        if isinstance(lhs, tl.tensor) and isinstance(rhs, tl.tensor):
            dtype = lhs.dtype
            widens = div_or_mod and dtype.primitive_bitwidth == 16
            if dtype is rhs.dtype and not dtype.is_ptr() and not widens:
                return broadcast_unlike(self, lhs, rhs)
        return check_operands(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    def cast_unlike(self: Any, input: Any, dst_ty: Any, fp_downcast_rounding: str | None = None) -> Any:
        if input.dtype is dst_ty.scalar:
            return input
        return cast(self, input, dst_ty, fp_downcast_rounding)

    def to_tensor_unless_one(self: Any, x: Any, check_type: bool = True) -> Any:
        return x if type(x) is tl.tensor else to_tensor(self, x, check_type)

    semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value = check_unlike, broadcast_unlike
    semantic.to_tensor = to_tensor_unless_one
    semantic.scalar_constant, semantic.cast = constant, cast_unlike


def _quicken_sorting(interpreter: Any) -> None:
    """Vectorise ``xor_sum``, which ``tl.sort`` uses and for which the interpreter loops over elements."""
    import triton.language as tl

    apply = interpreter.ReduceOps.apply_impl

    def reduce(self: Any, input: Any) -> Any:
        if self.combine_fn is not tl.standard._xor_combine or self.axis is None:
            return apply(self, input)
        (values,) = input
        found = np.bitwise_xor.reduce(values.handle.data, axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(found, values.dtype)

    interpreter.ReduceOps.apply_impl = reduce
