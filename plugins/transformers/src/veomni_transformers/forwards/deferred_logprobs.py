"""Log-probabilities of labels from logits that are not computed yet: the kernel computes them from the hidden states.

As of a fused loss, the gradient of the logits is deferred, so hooks on the output projection run and FSDP2 gathers its
weight in time.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from veomni_core.kernels import first_derivatives_only
from veomni_ops.token_logprobs import DIFFERENTIABLE, ENTROPY, LOGPROBS
from veomni_transformers.forwards.deferred_logits import DeferredGradient, DeferredLogits
from veomni_transformers.forwards.logit_steps import Step

Upstream = tuple[Tensor | None, ...]


def fused_logprobs(
    logits: DeferredLogits, labels: Tensor, temperature: float | Tensor, ignore_index: int, outputs: tuple[str, ...]
) -> tuple[Tensor, ...] | None:
    """The kernel's results for ``logits[N, V]`` and ``labels[N]``, each ``[N]``.

    ``None`` if the logits have been computed already, or come from arithmetic that no kernel takes over.
    """
    if logits.has_been_read or not logits.step.arithmetic_is_known:
        return None
    fused = _FusedLogprobs(logits.step, labels, temperature, ignore_index, outputs)
    return _Logprobs.apply(logits, fused)  # type: ignore[no-any-return,no-untyped-call]


class _FusedLogprobs:
    """Results that the kernel computed from a call's hidden states, in a graph that ends at the call's inputs."""

    def __init__(
        self, step: Step, labels: Tensor, temperature: float | Tensor, ignore_index: int, outputs: tuple[str, ...]
    ) -> None:
        self.step, self.labels, self.temperature = step, labels, temperature
        self.ignore_index, self.outputs = ignore_index, outputs
        self.values: tuple[Tensor, ...] = step.call.run_kernel(
            step.rows(),
            labels,
            temperature=temperature,
            softcap=step.softcap,
            scale=None if step.scale == 1.0 else step.scale,
            ignore_index=ignore_index,
            outputs=outputs,
        )

    def gradients(self, upstream: Upstream) -> Upstream:
        """The kernel's gradients of hidden states, weight and bias."""
        sent = [(value, each) for value, each in zip(self.values, upstream, strict=True) if each is not None]
        values, given = zip(*sent, strict=True)
        return self.step.call.gradients(values, given)

    def gradient_at(self, step: Step, upstream: Upstream) -> Tensor:
        """The gradient of the logits of ``step``, which is these results' step or an earlier one.

        Written out, since autograd is off while an operator on a deferred tensor is dispatched.
        """
        temperature: Any = self.temperature
        divisor = temperature.unsqueeze(1) if isinstance(temperature, Tensor) else temperature
        logprobs_NV = torch.log_softmax(self.step.logits().float() / divisor, dim=-1)
        p_NV = logprobs_NV.exp()
        counts_N1 = (self.labels != self.ignore_index).unsqueeze(1).to(p_NV.device)
        given = dict(zip(self.outputs, upstream, strict=True))
        gradient = torch.zeros_like(p_NV)
        if (dlogprobs := given.get(LOGPROBS)) is not None:
            of_label_NV = torch.zeros_like(p_NV).scatter_(1, self._targets().unsqueeze(1), 1.0)
            gradient += dlogprobs.unsqueeze(1) * (of_label_NV - p_NV)
        if (dentropy := given.get(ENTROPY)) is not None:
            entropy_N1 = -(p_NV * logprobs_NV).sum(-1, keepdim=True)
            gradient -= dentropy.unsqueeze(1) * p_NV * (logprobs_NV + entropy_N1)
        gradient = (torch.where(counts_N1, gradient, 0.0) / divisor).to(self.step.dtype)
        return self.step.gradient_at(step, gradient)

    def _targets(self) -> Tensor:
        return torch.where(self.labels != self.ignore_index, self.labels, 0).to(self.step.call.device)


class _Logprobs(torch.autograd.Function):
    """``logits[N, V] -> results[N]``: the values that the kernel gave, and a deferred gradient."""

    @staticmethod
    def forward(ctx: Any, logits: DeferredLogits, fused: _FusedLogprobs) -> tuple[Tensor, ...]:
        ctx.fused = fused
        ctx.set_materialize_grads(False)
        values = tuple(value.detach() for value in fused.values)
        constants = (value for value, name in zip(values, fused.outputs, strict=True) if name not in DIFFERENTIABLE)
        ctx.mark_non_differentiable(*constants)
        return values

    @staticmethod
    @partial(first_derivatives_only, op="token_logprobs")
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Any, None]:
        if all(each is None for each in upstream):
            return None, None
        return DeferredGradient.of(ctx.fused.step, ((ctx.fused, upstream),)), None
