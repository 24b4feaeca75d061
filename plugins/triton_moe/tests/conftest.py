"""Lets kernels that loop up to a run-time value run in Triton 3.6's interpreter beside NumPy 2.4."""

from __future__ import annotations

from triton.runtime import interpreter

_patch_tensor = interpreter._patch_lang_tensor


def _patch_tensor_and_index(tensor, scope):
    _patch_tensor(tensor, scope)
    # The interpreter's own calls int() on an array of one element, which NumPy 2.4 refuses.
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter._patch_lang_tensor = _patch_tensor_and_index
