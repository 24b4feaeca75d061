"""The two forwards of a fused loss: the model's, which opens a training step, and its output projection's.

The head is still called once as a module, with its hooks. In a training step with labels its forward returns
:class:`DeferredLogits`. The current step is kept in a ``ContextVar``, so each thread has its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.utils.generic import ModelOutput

from veomni_core.changes.change import setter_of
from veomni_core.errors import BindingError
from veomni_transformers.changes.bound_modules import adopt, binding_in
from veomni_transformers.forwards.deferred_logits import DeferredLogits, deferred_logits
from veomni_transformers.forwards.head_call import HeadCall, Kernel
from veomni_transformers.forwards.traced_logits import TracedLogits, TracedLoss
from veomni_transformers.forwards.vocabulary_shard import VocabularyShard

Forward = Callable[..., Any]
_NEEDED = (
    "the logits were needed before a plain cross entropy was taken of them (by an adapter or a hook on the output "
    "projection, by label smoothing, or by a loss function of your own)"
)
_PARAMETRIZED = "the output projection's weight was parametrized after bind"
_SHARDED_IN_A_GRAPH = "its vocabulary is sharded over ranks, and a graph gathers all logits"
_NOT_RUN = "an output projection other than the bound one ran"
_GATHERED = "`training_logits: computed` needs all logits, and the vocabulary is sharded over ranks"
_NO_TRANSFORMS = (
    "this model is bound, and its kernels do not run under torch.func's transforms (grad, vmap, jvp). Call "
    "binding_of(model).undo() first"
)


class FusedHead:
    """One bound loss: the forwards of the model and of its output projection, which share ``kernel``."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        # Of the forward that a graph is traced from; torch traces for one thread at a time.
        self._tracing = False
        self._traced = TracedLoss()

    def model_forward(self, original: Forward) -> Forward:
        """The model's forward: with labels, in training, its loss is fused with the output projection."""
        signature = inspect.signature(original)
        _, *parameters = signature.parameters  # without self
        labels_position = parameters.index("labels")

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            labels = args[labels_position] if len(args) > labels_position else kwargs.get("labels")
            if torch.compiler.is_compiling():
                # torch.export decomposes a kernel and loses its backward, so exported steps run the model's own loss.
                # The flag and not is_exporting(): up to torch 2.11 Dynamo answers that with True in every trace.
                own = labels is None or not self.training or torch.compiler._is_exporting_flag
                run = original if own else traced
                return run(self, *args, **kwargs)
            if torch._C._are_functorch_transforms_active():
                raise BindingError(_NO_TRANSFORMS)
            if labels is None or not self.training or torch.is_inference_mode_enabled():
                return original(self, *args, **kwargs)
            classes = binding_in(self)
            fused._adopt(self)
            step = _TrainingStep(fused, getattr(classes, "training_logits", "deferred"))
            token = _STEP.set(step)
            try:
                output = original(self, *args, **kwargs)
            finally:
                _STEP.reset(token)
                for call in step.calls:
                    call.open = False
            if classes is None:  # a probe model in a proof, not a bound model
                return output
            if not any(call.fused for call in step.calls):
                classes.note("the loss", step.declined or (_NEEDED if step.calls else _NOT_RUN), "in such a step")
            return _as_asked(output, classes.training_logits)

        def traced(self: Any, *args: Any, **kwargs: Any) -> Any:
            fused._tracing, fused._traced = True, TracedLoss()
            try:
                output = original(self, *args, **kwargs)
            finally:
                fused._tracing = False
            classes = binding_in(self)
            if classes is None:
                return _without_traced(output, "deferred")
            if not fused._traced.fused:
                classes.note_in_trace("the loss", fused._traced.declined or _NEEDED)
            return _without_traced(output, classes.training_logits)

        fused = self
        forward.__signature__ = signature  # type: ignore[attr-defined]
        return forward

    def head_forward(self, original: Forward) -> Forward:
        """The output projection's forward, ``[..., H] -> [..., V]``."""
        fused = self

        def forward(self: Any, input: Tensor) -> Any:
            if torch.compiler.is_compiling():
                if fused._tracing and _is_plain(self):
                    return TracedLogits(input, self.weight, self.bias, fused._kernel, self, fused._traced)
                fused._traced.declined = "" if _is_plain(self) else _PARAMETRIZED
                return original(self, input)
            step = _STEP.get()
            if step is None or step.fused is not fused:
                return original(self, input)
            step.declined = why_not_deferred(self, input)
            if step.declined:
                return original(self, input)
            weight, bias = self.weight, self.bias
            call = HeadCall(input, weight, bias, fused._kernel, self)
            step.calls.append(call)
            return deferred_logits(call, input, weight, bias)

        return forward

    def sharded_head_forward(self, gathering: Forward) -> Forward:
        """The forward of an output projection whose words are sharded over ranks.

        ``gathering`` is the forward that tensor parallelism gave to the module: it gathers all logits.
        """
        fused = self

        def forward(self: Any, input: Tensor) -> Any:
            if torch.compiler.is_compiling():
                fused._traced.declined = _SHARDED_IN_A_GRAPH
                return gathering(input)
            step = _STEP.get()
            if step is None or step.fused is not fused:
                return gathering(input)
            step.declined = _GATHERED if step.training_logits == "computed" else why_not_deferred(self, input, DTensor)
            if step.declined:
                return gathering(input)
            weight, bias = self.weight.to_local(), None if self.bias is None else self.bias.to_local()
            call = HeadCall(input, weight, bias, fused._kernel, self, VocabularyShard.of(self.weight))
            step.calls.append(call)
            return deferred_logits(call, input, weight, bias)

        return forward

    def _adopt(self, model: Any) -> None:
        """Bind a plain linear that has replaced the head since bind, as resizing the vocabulary does."""
        head, classes = model.get_output_embeddings(), binding_in(model)
        if classes is not None and type(head) is nn.Linear and why_not_plain(head) == "":
            adopt(classes, head, self.head_forward(nn.Linear.forward), "the output projection, replaced since")


class _TrainingStep:
    """A forward with labels that is running in this thread, and the calls of its output projection.

    ``declined`` is why the last call's logits were computed at once; empty if they were deferred. ``training_logits``
    is the config's.
    """

    def __init__(self, fused: FusedHead, training_logits: str) -> None:
        self.fused, self.training_logits = fused, training_logits
        self.calls: list[HeadCall] = []
        self.declined = ""


_STEP: ContextVar[_TrainingStep | None] = ContextVar("veomni_training_step", default=None)


def why_not_plain(head: Any) -> str:
    """Why ``head`` does not compute torch's own linear; empty if it does."""
    kind = type(head)
    if not isinstance(head, nn.Linear):
        return f"the output projection is a {kind.__name__}, expected a linear"
    if setter := setter_of(head):
        return f"the output projection was given a forward of its own: it was {setter}"
    if hasattr(head, "parametrizations"):
        return "the output projection's weight is parametrized"
    if kind.forward is not nn.Linear.forward:
        return f"the output projection is a {kind.__name__}, whose forward is not torch's linear"
    return ""


def why_not_deferred(head: Any, hidden: Tensor, *kinds_of_weight: type) -> str:
    """Why this call's logits must be computed at once; empty if they can be deferred."""
    if not _is_plain(head):
        return _PARAMETRIZED
    kinds = (Tensor, nn.Parameter)
    for name, tensor, taken in (("hidden states", hidden, kinds), ("weight", head.weight, kinds_of_weight or kinds)):
        if type(tensor) not in taken:
            kind = type(tensor).__name__
            return f"the output projection's {name} is a {kind}, which no kernel takes"
    return ""


def _is_plain(head: Any) -> bool:
    """Whether the bound ``head`` is still a linear over parameters: a parametrization computes its weight each time."""
    return "parametrizations" not in head._modules


def _as_asked(output: Any, training_logits: str) -> Any:
    """The model's output, with its logits as the config's ``training_logits`` requests them."""
    if training_logits == "deferred" or not isinstance(output, ModelOutput):
        return output
    for name, value in list(output.items()):
        if isinstance(value, DeferredLogits):
            if training_logits == "computed":
                value.compute()
            elif value.computed is None:
                output[name] = None
    return output


def _without_traced(output: Any, training_logits: str) -> Any:
    """The output of a traced forward, with ``None`` for logits, or the real logits if they are requested.

    With the real logits the graph would compute them in every step, even if nobody reads them. A tuple always holds the
    real ones, since its second place is the logits'.
    """
    if isinstance(output, ModelOutput):
        for name, value in list(output.items()):
            if isinstance(value, TracedLogits):
                output[name] = value.materialize() if training_logits == "computed" else None
        return output
    return tuple(value.materialize() if isinstance(value, TracedLogits) else value for value in output)
