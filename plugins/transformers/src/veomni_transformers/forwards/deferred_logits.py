"""Logits that are computed only when something reads them: what a bound output projection returns in training.

To autograd they are a tensor like any other, made from hidden states and weight. The operators of
:mod:`veomni_transformers.forwards.logit_steps` leave them deferred. A plain ``cross_entropy`` of them calls the kernel
on the hidden states instead of computing them.

Their gradient is deferred in the same way. A fused loss sends back a :class:`DeferredGradient` of the logits' shape, so
that hooks run, FSDP2 gathers the weight in time, and ``retain_grad`` works. If it reaches the projection as it left the
loss, the kernel's own backward gives the gradients. If a hook has read or changed it, or another loss's gradient was
added to it, its values have been computed by then, and the projection's ordinary backward uses them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from veomni_core.kernels import IGNORED, autocast_dtype, first_derivatives_only
from veomni_transformers.forwards.deferred_tensor import DeferredTensor
from veomni_transformers.forwards.head_call import HeadCall
from veomni_transformers.forwards.logit_steps import Step

aten = torch.ops.aten
_NO_BACKWARD = -1
_REDUCTIONS = ("none", "mean", "sum")  # a reduction's index here is its number in aten


class DeferredLogits(DeferredTensor):
    """Logits ``[..., V]`` after ``step``; ``source`` are the logits that the step was applied to."""

    step: Step
    source: DeferredLogits | None

    @classmethod
    def of(cls, step: Step, source: DeferredLogits | None = None) -> DeferredLogits:
        """Make logits that are not computed yet."""
        made: DeferredLogits = cls.make(
            step.shape, step.dtype, step.call.device, [] if source is None else source.family
        )
        made.step, made.source = step, source
        return made

    @property
    def has_been_read(self) -> bool:
        """Whether these logits, or others of the same call, have been computed."""
        return any((relative := each()) is not None and relative.computed is not None for each in self.family)

    def values_now(self) -> Tensor:
        return self.step.logits() if self.source is None else self.step.run(self.source.compute())

    def deferred(self, operator: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> DeferredLogits | None:
        # Autograd detaches what it saved, such as the result of a softcap's tanh, and passes it on with a gradient.
        saved = operator is aten.detach.default and torch._C._current_graph_task_id() != _NO_BACKWARD
        # In mixed precision accelerate casts what a model's forward returned; nobody has read the logits by that.
        to_float32 = options.get("dtype") is torch.float32 and self.dtype is not torch.float32
        cast = operator is aten._to_copy.default and to_float32
        step = self.step.then(operator, arguments, options) if self.step.call.open or saved or cast else None
        return None if step is None else DeferredLogits.of(step, self)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is F.cross_entropy and args and isinstance(args[0], DeferredLogits):
            loss = fused_cross_entropy(*args, **(kwargs or {}))
            if loss is not None:
                return loss
        return super().__torch_function__(function, types, args, kwargs)


class Fused(Protocol):
    """What a kernel computed of deferred logits, such as a loss, in a graph that ends at the call's inputs."""

    def gradients(self, upstream: Any) -> tuple[Tensor | None, ...]:
        """The kernel's gradients with respect to hidden states, weight and bias."""

    def gradient_at(self, step: Step, upstream: Any) -> Tensor:
        """The gradient with respect to the logits of ``step``, by other means than the kernel."""


class DeferredGradient(DeferredTensor):
    """The gradient of fused losses with respect to the logits of ``step``, on its way back to the projection.

    Each of ``parts`` is something fused and its upstream gradient.
    """

    step: Step
    parts: tuple[tuple[Fused, Any], ...]

    @classmethod
    def of(cls, step: Step, parts: tuple[tuple[Fused, Any], ...]) -> DeferredGradient:
        """Make a gradient that is not computed yet."""
        made: DeferredGradient = cls.make(step.shape, step.dtype, step.call.device, [])
        made.step, made.parts = step, parts
        return made

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Only Python code gets here, such as a hook: autograd's own operators go to __torch_dispatch__ alone. Compute
        # the values first, or a hook's `gradient * 2` would be taken for the backward of a logits' scale.
        if function.__name__ not in ("__get__", "__set__"):
            for value in args:
                if isinstance(value, DeferredGradient):
                    value.compute()
        return super().__torch_function__(function, types, args, kwargs)

    def values_now(self) -> Tensor:
        first, *others = (loss.gradient_at(self.step, upstream) for loss, upstream in self.parts)
        return sum(others, first)

    def deferred(self, operator: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> DeferredGradient | None:
        if operator in (aten.detach.default, aten.alias.default):
            return DeferredGradient.of(self.step, self.parts)
        if operator is aten.add.Tensor and isinstance(other := arguments[0], DeferredGradient) and not options:
            same = other.step is self.step and other.computed is None
            return DeferredGradient.of(self.step, (*self.parts, *other.parts)) if same else None
        before = self.step.before(operator)
        return None if before is None else DeferredGradient.of(before, self.parts)


class _FusedLoss:
    """One loss that the kernel computed from a call's hidden states, in a graph that ends at the call's inputs."""

    def __init__(self, step: Step, labels: Tensor, ignore_index: int, reduction: str) -> None:
        self.step, self.labels, self.ignore_index, self.reduction = step, labels, ignore_index, reduction
        self.value = step.call.run_kernel(
            step.rows(),
            labels,
            ignore_index=ignore_index,
            num_items_in_batch=None if reduction == "mean" else 1,
            softcap=step.softcap,
            scale=None if step.scale == 1.0 else step.scale,
        )

    def gradients(self, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """The kernel's gradients with respect to hidden states, weight and bias."""
        return self.step.call.gradients([self.value], [upstream.to(self.value.dtype)])

    def gradient_at(self, step: Step, upstream: Tensor) -> Tensor:
        """The gradient with respect to the logits of ``step``, which is the loss's step or an earlier one.

        Calls the operators of eager code's backward directly, since autograd is off while an operator on a deferred
        tensor is dispatched.
        """
        log_probabilities = torch.log_softmax(self.step.logits(), dim=-1)
        how = (None, _REDUCTIONS.index(self.reduction), self.ignore_index)
        labels = self.labels.to(log_probabilities.device)
        _, items = aten.nll_loss_forward(log_probabilities, labels, *how)
        upstream = upstream.to(log_probabilities.dtype)
        gradient = aten.nll_loss_backward(upstream, log_probabilities, labels, *how, items)
        gradient = aten._log_softmax_backward_data(gradient, log_probabilities, -1, log_probabilities.dtype)
        return self.step.gradient_at(step, gradient)


def fused_cross_entropy(
    input: DeferredLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = IGNORED,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """The kernel's loss for a call of ``torch.nn.functional.cross_entropy``.

    ``None`` if the call is not plain cross entropy of ``input[T, V]`` and ``target[T]``, or if the logits have been
    computed already.
    """
    step = input.step
    plain = weight is None and size_average is None and reduce is None and label_smoothing == 0.0
    fits = input.dim() == 2 and target.dim() == 1 and target.shape[0] == input.shape[0]
    deferred = step.call.open and step.arithmetic_is_known and not input.has_been_read
    if not (plain and fits and deferred) or target.is_floating_point():
        return None
    if reduction not in ("mean", "sum"):
        return None
    return _Loss.apply(input, _FusedLoss(step, target, ignore_index, reduction))  # type: ignore[no-untyped-call]


class _Loss(torch.autograd.Function):
    """``logits[T, V] -> loss``: the value that the kernel gave, and a deferred gradient."""

    @staticmethod
    def forward(ctx: Any, logits: DeferredLogits, loss: _FusedLoss) -> Tensor:
        ctx.loss = loss
        # The dtype of eager code's loss: the logits', but under autocast every cross entropy is computed in float32.
        autocast = autocast_dtype(loss.value.device.type) is not None
        return loss.value.detach().to(torch.float32 if autocast else loss.step.dtype)

    @staticmethod
    @partial(first_derivatives_only, op="cross_entropy_loss")
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, None]:
        return DeferredGradient.of(ctx.loss.step, ((ctx.loss, upstream),)), None


class _Projection(torch.autograd.Function):
    """``hidden[..., H], weight[V, H], bias[V] -> logits[..., V]``, deferred."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, call: HeadCall) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return DeferredLogits.of(Step(call, torch.Size((*hidden.shape[:-1], call.vocabulary)), call.dtype))

    @staticmethod
    @partial(first_derivatives_only, op="cross_entropy_loss")
    def backward(ctx: Any, dlogits: Tensor) -> tuple[Tensor | None, ...]:
        if isinstance(dlogits, DeferredTensor):
            if isinstance(dlogits, DeferredGradient) and dlogits.computed is None:
                return *_summed([loss.gradients(upstream) for loss, upstream in dlogits.parts]), None
            dlogits = dlogits.compute()
        hidden, weight = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias, _ = ctx.needs_input_grad
        dlogits_TV = dlogits.reshape(-1, dlogits.shape[-1])
        hidden_TH = hidden.reshape(-1, hidden.shape[-1]).to(dlogits.dtype)
        dhidden = (dlogits @ weight.to(dlogits.dtype)).to(hidden.dtype) if wants_hidden else None
        dweight = (dlogits_TV.t() @ hidden_TH).to(weight.dtype) if wants_weight else None
        return dhidden, dweight, dlogits_TV.sum(0).to(weight.dtype) if wants_bias else None, None


def _summed(parts: list[tuple[Tensor | None, ...]]) -> tuple[Tensor | None, ...]:
    columns = ([each for each in column if each is not None] for column in zip(*parts, strict=True))
    return tuple(sum(column[1:], column[0]) if column else None for column in columns)


def deferred_logits(call: HeadCall, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``hidden[..., H] @ weight[V, H].T + bias[V]``, connected to autograd and not computed."""
    return _Projection.apply(hidden, weight, bias, call)  # type: ignore[no-untyped-call]
