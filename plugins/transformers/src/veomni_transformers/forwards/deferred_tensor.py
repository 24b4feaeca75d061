"""A tensor whose values are computed when an operator needs them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

# These read memory without calling an operator, so they are called on the computed tensor.
_READ_MEMORY = {
    Tensor.numpy,
    Tensor.__array__,
    Tensor.tolist,
    Tensor.data_ptr,
    Tensor.storage,
    Tensor.untyped_storage,
    Tensor.share_memory_,
    Tensor.__reduce_ex__,
    Tensor.__deepcopy__,
    Tensor.__dlpack__,
    Tensor.__repr__,
    Tensor.__format__,
}


class DeferredTensor(Tensor):
    """Has a shape, a dtype, a device and a place in autograd's graph from the start, and values on first use.

    A subclass defines how to compute its values, and which operators give a result that is deferred too.
    """

    computed: Tensor | None
    # All tensors derived from one source. They must all be computed before a write into one of them.
    family: list[weakref.ref[DeferredTensor]]

    @classmethod
    def make(cls, shape: torch.Size, dtype: torch.dtype, device: torch.device, family: list[Any]) -> Any:
        """A deferred tensor that belongs to ``family``."""
        made = cls._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)  # type: ignore[attr-defined]
        made.computed, made.family = None, family
        family.append(weakref.ref(made))
        return made

    def compute(self) -> Tensor:
        """The values, without a graph; the same tensor each time, so that what is written into it stays."""
        if self.computed is None:
            self.computed = self.values_now()
        return self.computed

    def values_now(self) -> Tensor:
        """Compute the values."""
        raise NotImplementedError

    def deferred(self, operator: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> DeferredTensor | None:
        """The result of ``operator``, not computed yet; ``None`` if the operator needs the values."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in _READ_MEMORY:
            plain = args[0].compute().detach().requires_grad_(args[0].requires_grad)
            return function(plain, *args[1:], **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            if function is Tensor.data.__get__:  # type: ignore[attr-defined]
                return args[0].detach()
            return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args and isinstance(args[0], DeferredTensor) else None
        if operator._schema.is_mutable:
            for each in tree_leaves((args, kwargs)):
                if isinstance(each, DeferredTensor):
                    each.compute_family()
        elif first is not None and first.computed is None:
            result = first.deferred(operator, args[1:], kwargs)
            if result is not None:
                return result
        result = operator(*tree_map(_computed, args), **tree_map(_computed, kwargs))
        # An in-place operator returns its first argument: return this tensor, not the one that holds its values.
        return first if first is not None and result is first.computed else result

    def compute_family(self) -> None:
        """Compute all tensors that were derived from the same source, before a write changes it."""
        for reference in self.family:
            relative = reference()
            if relative is not None:
                relative.compute()


def _computed(value: Any) -> Any:
    return value.compute() if isinstance(value, DeferredTensor) else value
