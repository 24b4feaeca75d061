"""A scan over neighbouring tokens at a time, whose insides autograd follows one group of tokens at a time.

Backward keeps the inputs and the state before each group, and computes one group at a time again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from veomni_core.kernels import first_derivatives_only, without_autocast

# Numbers in the largest temporary of a group. An accelerator needs more of them, to be busy.
_CPU_GROUP, _ACCELERATOR_GROUP = 1 << 18, 1 << 24


@dataclass(frozen=True)
class Groups:
    """How a scan is computed.

    Attributes:
        inside: ``inside(inputs, parameter, state, numbers)`` gives the output of some tokens, and the state after them;
            ``numbers`` are the packed sequences of the token before these and of each ``[B, 1 + S]``, or ``None``.
        state: the shape of a state.
        tokens: of a group.
        dtype: that of all arithmetic.
    """

    inside: Callable[[Sequence[Tensor], Any, Tensor, Tensor | None], tuple[Tensor, Tensor]]
    state: tuple[int, ...]
    tokens: int
    dtype: torch.dtype

    def of(self, length: int) -> Iterator[slice]:
        """The tokens of each group."""
        for first in range(0, length, self.tokens):
            yield slice(first, min(first + self.tokens, length))


def numbers_at_once(device: torch.device) -> int:
    """How many numbers the largest temporary of a group may have."""
    return _CPU_GROUP if device.type == "cpu" else _ACCELERATOR_GROUP


def scanned_in_groups(
    groups: Groups, along: Sequence[Tensor], parameter: Tensor | None, initial: Tensor | None, seq_idx: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The output, of the shape of the first tensor of ``along``, and the final state.

    Args:
        groups: how.
        along: tensors ``[B, S, ...]``.
        parameter: a tensor that all tokens share.
        initial: the state before the first token, or zeros.
        seq_idx: the number of each token's packed sequence ``[B, S]``.
    """
    numbers = None if seq_idx is None else _numbers(seq_idx)
    return _Scan.apply(groups, numbers, parameter, initial, *along)  # type: ignore[no-any-return]


class _Scan(Function):
    @staticmethod
    @without_autocast
    def forward(
        ctx: Any,
        groups: Groups,
        numbers: Tensor | None,
        parameter: Tensor | None,
        initial: Tensor | None,
        *along: Tensor,
    ) -> tuple[Tensor, Tensor]:
        x, wide = along[0], groups.dtype
        state = x.new_zeros(groups.state, dtype=wide) if initial is None else initial.to(wide, copy=True)
        output = torch.empty(x.shape, dtype=wide, device=x.device)
        shared = None if parameter is None else parameter.to(wide)
        kept = []
        for tokens in groups.of(x.shape[1]):
            kept.append(state)
            inputs = [each[:, tokens].to(wide) for each in along]
            output[:, tokens], state = groups.inside(inputs, shared, state, _of_group(numbers, tokens))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(numbers, parameter, *along, *(kept if any(ctx.needs_input_grad) else ()))
        ctx.groups, ctx.inputs, ctx.initial_dtype = groups, len(along), None if initial is None else initial.dtype
        return output, state

    @staticmethod
    @first_derivatives_only
    @without_autocast
    def backward(ctx: Any, doutput: Tensor | None, dfinal: Tensor | None = None) -> tuple[Any, ...]:
        numbers, parameter, *tensors = ctx.saved_tensors
        along, kept = tensors[: ctx.inputs], tensors[ctx.inputs :]
        if doutput is None and dfinal is None:
            return (None,) * (4 + len(along))
        groups, x, wide = ctx.groups, along[0], ctx.groups.dtype
        needs_parameter, needed = ctx.needs_input_grad[2], ctx.needs_input_grad[4:]
        gradients = [
            torch.empty(each.shape, dtype=each.dtype, device=each.device) for each in itertools.compress(along, needed)
        ]
        dparameter = parameter.new_zeros(parameter.shape, dtype=wide) if needs_parameter else None
        dstate = x.new_zeros(groups.state, dtype=wide) if dfinal is None else dfinal
        for tokens, state in reversed(list(zip(groups.of(x.shape[1]), kept, strict=True))):
            # Copies, even where nothing is cast: leaves must not be views of what autograd keeps.
            leaves = [
                each[:, tokens].to(wide, copy=True).requires_grad_(wanted)
                for each, wanted in zip(along, needed, strict=True)
            ]
            shared = None if parameter is None else parameter.to(wide, copy=True).requires_grad_(needs_parameter)
            before = state.detach().requires_grad_()
            with torch.enable_grad():
                output, after = groups.inside(leaves, shared, before, _of_group(numbers, tokens))
            upstream = torch.zeros_like(output) if doutput is None else doutput[:, tokens]
            sought = [before, *(each for each in (*leaves, shared) if each is not None and each.requires_grad)]
            dstate, *found = torch.autograd.grad((output, after), sought, (upstream, dstate))
            for into, gradient in zip(gradients, found, strict=False):  # the parameter's comes after these
                into[:, tokens] = gradient
            if dparameter is not None:
                dparameter += found[-1]
        filled = iter(gradients)
        wanted_gradients = [next(filled) if wanted else None for wanted in needed]
        shared_gradient = None if dparameter is None else dparameter.to(parameter.dtype)
        dinitial = dstate.to(ctx.initial_dtype) if ctx.needs_input_grad[3] else None
        return None, None, shared_gradient, dinitial, *wanted_gradients


def _numbers(seq_idx: Tensor) -> Tensor:
    """How many sequences of its row end before each token ``[B, S]``."""
    changes = torch.zeros_like(seq_idx, dtype=torch.int32)
    changes[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    return changes.cumsum(1, dtype=torch.int32)


def _of_group(numbers: Tensor | None, tokens: slice) -> Tensor | None:
    """The number of the token before the group, and those of its tokens ``[B, 1 + S]``."""
    if numbers is None:
        return None
    part = numbers[:, max(0, tokens.start - 1) : tokens.stop]
    return part if tokens.start else torch.cat([part[:, :1], part], dim=1)
