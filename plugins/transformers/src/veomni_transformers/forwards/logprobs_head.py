"""Log-probabilities of a model's tokens: while they are asked for, a bound output projection defers its logits.

Shape suffixes: ``B`` sequences, ``T`` tokens of each, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from veomni_ops.token_logprobs import of_logits
from veomni_transformers.forwards.deferred_logits import DeferredLogits, deferred_logits
from veomni_transformers.forwards.deferred_logprobs import fused_logprobs
from veomni_transformers.forwards.fused_head import why_not_deferred
from veomni_transformers.forwards.head_call import HeadCall, Kernel

Forward = Callable[..., Any]


@dataclass(frozen=True)
class Scores:
    """What :func:`score` found of one forward.

    Attributes:
        results: per output, float32 in the shape of the labels.
        output: what the forward returned.
        fused: whether a bound kernel computed the results.
        why_not: why it did not, where a bound head has run.
    """

    results: tuple[Tensor, ...]
    output: Any
    fused: bool
    why_not: str = ""


class _Call:
    """One forward by a thread that asks for log-probabilities, and what its bound output projections did.

    ``declined`` is why the last of them computed its logits at once; empty if it deferred them.
    """

    def __init__(self) -> None:
        self.heads: list[HeadCall] = []
        self.declined = ""


_CALL: ContextVar[_Call | None] = ContextVar("veomni_logprobs_call", default=None)


def score(
    forward: Callable[[], Any],
    labels_BT: Tensor,
    *,
    temperature: float | Tensor,
    ignore_index: int,
    outputs: tuple[str, ...],
) -> Scores:
    """Log-probabilities and other outputs of the op for ``labels[B, T]``, which are shifted already.

    Args:
        forward: runs the model. Its result has ``logits[B, T, V]``, or a position more than there are labels; the last
            one then counts for nothing.
        labels_BT, temperature, ignore_index, outputs: as of the op's reference, with sequences.

    Raises:
        ValueError: the labels don't fit the logits, or one is not in the vocabulary.
    """
    with _open_call() as call:
        output = forward()
        logits_BTV: Tensor = output.logits
        _refuse_misfits(labels_BT, logits_BTV, ignore_index)
        rows_NV = logits_BTV[:, : labels_BT.shape[1]].reshape(-1, logits_BTV.shape[-1])
        labels_N = labels_BT.reshape(-1).to(rows_NV.device)
        divisor = temperature.reshape(-1) if isinstance(temperature, Tensor) else temperature
        found, why_not = None, call.declined
        if isinstance(rows_NV, DeferredLogits):
            found = fused_logprobs(rows_NV, labels_N, divisor, ignore_index, outputs)
        fused = found is not None
        if found is None:
            if call.heads and not why_not:
                why_not = "something between the output projection and its result needs the logits themselves"
            found = of_logits(rows_NV, labels_N, divisor, ignore_index=ignore_index, outputs=outputs)
    return Scores(tuple(each.view(labels_BT.shape) for each in found), output, fused, why_not)


@contextmanager
def _open_call() -> Iterator[_Call]:
    """Bound output projections defer their logits in this context. After it, operators on the logits compute them."""
    call = _Call()
    token = _CALL.set(call)
    try:
        yield call
    finally:
        _CALL.reset(token)
        for each in call.heads:
            each.open = False


def _refuse_misfits(labels_BT: Tensor, logits_BTV: Tensor, ignore_index: int) -> None:
    """Check the labels here, since on a GPU a wrong index would end the process. It waits for the labels alone."""
    batch, positions, vocabulary = logits_BTV.shape
    if labels_BT.shape not in ((batch, positions), (batch, positions - 1)):
        raise ValueError(f"labels for {tuple(labels_BT.shape)} positions don't fit logits of {(batch, positions)}")
    beyond = ((labels_BT < 0) | (labels_BT >= vocabulary)) & (labels_BT != ignore_index)
    wrong = labels_BT[beyond]
    if wrong.numel():
        raise ValueError(
            f"label {int(wrong[0])} is not in the vocabulary of {vocabulary} words; positions that don't count have "
            f"ignore_index, which is {ignore_index}"
        )


def logprobs_head_forward(original: Forward, kernel: Kernel) -> Forward:
    """The output projection's forward, ``[..., H] -> [..., V]``; ``original`` runs unless log-probabilities are asked.

    What is traced for a graph runs ``original`` too.
    """

    def forward(self: Any, input: Tensor) -> Any:
        call = None if torch.compiler.is_compiling() else _CALL.get()
        if call is None:
            return original(self, input)
        call.declined = why_not_deferred(self, input)
        if call.declined:
            return original(self, input)
        weight, bias = self.weight, self.bias
        head_call = HeadCall(input, weight, bias, kernel, self)
        call.heads.append(head_call)
        return deferred_logits(head_call, input, weight, bias)

    return forward
