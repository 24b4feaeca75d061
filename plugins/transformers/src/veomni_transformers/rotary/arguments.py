"""Rotary functions that take their angles in another form than the contracts: as complex numbers, or without a batch.

Such a function is proven as the contract's, behind a translation of its arguments, and the kernel is bound behind the
reverse translation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., Any]
COMPLEX, COMPLEX_PATCHES, UNBATCHED = "complex", "complex of patches", "unbatched"


def form_of(args: tuple[Any, ...], kwargs: Any) -> str:
    """The form in which ``args`` have angles; empty for that of the contracts.

    ``complex`` are ``freqs[B, S, D/2]`` for ``[B, S, H, D]`` (Llama 4), ``complex of patches`` those of one picture for
    all, ``[S, D/2]``; ``unbatched`` are ``cos[S, D]`` and ``sin[S, D]`` for ``[1, H, S, D]`` (Pixtral).
    """
    tensors = [each for each in args if isinstance(each, Tensor)]
    if len(args) == len(tensors) == 3 and tensors[2].is_complex() and tensors[0].dim() == tensors[1].dim() == 4:
        return {3: COMPLEX, 2: COMPLEX_PATCHES}.get(tensors[2].dim(), "")
    unbatched = len(args) == len(tensors) == 4 and tensors[2].dim() == 2 and tensors[0].dim() == 4
    return UNBATCHED if unbatched and kwargs.get("unsqueeze_dim") == 0 else ""


def as_in_contracts(form: str, args: tuple[Any, ...], kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a contract's reference for a call of this form.

    Example:
        >>> queries, angles = torch.zeros(1, 3, 2, 4), torch.polar(torch.ones(1, 3, 2), torch.zeros(1, 3, 2))
        >>> (_, _, cos, _), options = as_in_contracts(COMPLEX, (queries, queries, angles), {})
        >>> cos.shape, options
        (torch.Size([1, 3, 4]), {'unsqueeze_dim': 2})
    """
    if form == UNBATCHED:
        q, k, cos, sin = args
        return (q, k, cos[None], sin[None]), {**kwargs, "unsqueeze_dim": 1}
    if form:
        q, k, angles = args
        cos, sin = (torch.repeat_interleave(each, 2, dim=-1) for each in (angles.real, angles.imag))
        return (q, k, cos, sin), {**kwargs, **({"unsqueeze_dim": 2} if form == COMPLEX else {})}
    return args, dict(kwargs)


def of_contract(function: Function, form: str) -> Function:
    """``function``, taking a contract's arguments."""

    def unbatched(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        return function(q, k, cos[0], sin[0], unsqueeze_dim=0)

    def with_complex(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **options: Any) -> Any:
        return function(q, k, torch.complex(cos[..., ::2].float(), sin[..., ::2].float()))

    return {"": function, UNBATCHED: unbatched}.get(form, with_complex)


def kernel_for(kernel: Function, form: str) -> Function:
    """``kernel``, taking the arguments of a function of this form."""

    def unbatched(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 0) -> Any:
        return kernel(q, k, cos[None], sin[None], unsqueeze_dim=1)

    def with_complex(q: Tensor, k: Tensor, *freqs: Tensor, **named: Tensor) -> Any:
        args, options = as_in_contracts(form, (q, k, *freqs, *named.values()), {})
        return kernel(*args, **options)

    return {"": kernel, UNBATCHED: unbatched}.get(form, with_complex)
