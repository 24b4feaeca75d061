"""Kernels without a backward, which are bound for evaluation only."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from veomni_core.descriptions.kernel_spec import KernelSpec
from veomni_core.errors import BindingError


def loaded(spec: KernelSpec) -> Callable[..., Any]:
    """The kernel of ``spec``. One without a backward refuses calls whose gradients are recorded.

    Without that, autograd would take its result for a constant, and training would go on with gradients of zero.

    Raises:
        KernelLoadError: as of :meth:`KernelSpec.load`.
    """
    kernel = spec.load()
    if spec.backward:
        return kernel

    @wraps(kernel)
    def evaluated(*args: Any, **kwargs: Any) -> Any:
        given = tree_leaves((args, kwargs)) if torch.is_grad_enabled() else ()
        if any(getattr(each, "requires_grad", False) for each in given):
            raise BindingError(
                f"{spec} has no backward and was bound for evaluation: call the model under torch.no_grad() or "
                "torch.inference_mode(). To train, undo() the binding and bind with training=True"
            )
        return kernel(*args, **kwargs)

    return evaluated
