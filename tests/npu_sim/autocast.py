"""What autocast does on the simulated NPU: torch_npu casts the inputs of the operators that PyTorch casts on CUDA.

Only the operators that a transformer reaches are listed; PyTorch's own lists are in ``aten/src/ATen/autocast_mode.h``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

# Matrix products take autocast's dtype.
_LOW = ("addbmm", "addmm", "baddbmm", "bmm", "einsum", "linear", "matmul", "mm", "mv", "scaled_dot_product_attention")
# What loses too much in 16 bits takes float32.
_WIDE = (
    *("exp", "expm1", "log", "log1p", "logsumexp", "pow.Tensor_Scalar", "reciprocal", "rsqrt", "softplus"),
    *("cross_entropy_loss", "nll_loss", "nll_loss_nd", "layer_norm", "softmax.int", "log_softmax.int"),
)
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)


def register(aten: torch.library.Library) -> None:
    """Give ``aten`` the operators that cast; all others are for the caller to let through."""
    for names, dtype in ((_LOW, _chosen_dtype), (_WIDE, lambda: torch.float32)):
        for name in names:
            base, _, overload = name.partition(".")
            operator = getattr(getattr(torch.ops.aten, base), overload or "default")
            aten.impl(name, functools.partial(_run_cast, operator, dtype), "AutocastPrivateUse1")


def _chosen_dtype() -> torch.dtype:
    return torch.get_autocast_dtype("npu")


def _run_cast(operator: Callable[..., Any], dtype: Callable[[], torch.dtype], *args: Any, **kwargs: Any) -> Any:
    def cast(argument: Any) -> Any:
        # As PyTorch's casts: not float64, and not what is on another device.
        if not isinstance(argument, Tensor) or argument.device.type != "npu":
            return argument
        if not argument.is_floating_point() or argument.dtype == torch.float64:
            return argument
        return argument.to(dtype())

    with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
        return operator(*tree_map(cast, args), **tree_map(cast, kwargs))
