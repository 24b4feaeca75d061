"""cross_entropy_loss/causal sites: language models whose loss is taken of ``lm_head(hidden)`` and nothing in between.

The fused kernel needs the hidden states and the head's weight, while transformers hands logits to the loss. So, in
training with labels, the bound head gives :class:`LazyLogits`, and the bound loss function asks the head for the loss.
The head runs as the module that it is, with its hooks, so a sharded weight is whole where the kernel reads it.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable
from functools import partial, wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from veomni_core.ops.cross_entropy_loss import CONTRACTS
from veomni_core.sites import probe
from veomni_core.sites.functions import current_forward
from veomni_core.sites.lazy_logits import LazyLogits, LogitsRequest
from veomni_core.sites.site import AttributeChange, Change, Kernel, Site

_HIDDEN, _VOCABULARY, _IGNORED = 8, 11, -100
_DEFER = "_veomni_defer_logits"


class CausalLosses:
    """Finds causal language models and fuses their output projection with their loss."""

    def find(self, model: nn.Module, rule: str) -> Iterable[Site]:
        for path, module in model.named_modules():
            if getattr(module, "loss_type", None) == "ForCausalLM" and hasattr(module, "loss_function"):
                yield Site("cross_entropy_loss", path, rule, *_prove(module))

    def install(self, model: nn.Module, site: Site, kernel: Kernel | None) -> Iterable[Change]:
        assert kernel is not None
        module = model.get_submodule(site.path)
        head = module.get_output_embeddings()  # type: ignore[operator]
        yield AttributeChange(head, _DEFER, False)
        yield AttributeChange(head, "forward", MethodType(_deferring_head(current_forward(head), kernel), head))
        yield AttributeChange(module, "_loss_function", _fused_loss(module.loss_function))  # type: ignore[arg-type]
        yield AttributeChange(module, "forward", MethodType(_deferring_model(current_forward(module)), module))


class _LossRequest:
    """What the bound head needs to compute the loss instead of logits."""

    def __init__(self, hidden: Tensor, labels: Tensor, num_items: Any, ignore_index: int) -> None:
        self.hidden, self.labels, self.num_items, self.ignore_index = hidden, labels, num_items, ignore_index


def _deferring_model(original: Callable[..., Any]) -> Callable[..., Any]:
    labels_position = list(inspect.signature(original).parameters).index("labels") - 1

    @wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        labels = args[labels_position] if len(args) > labels_position else kwargs.get("labels")
        if labels is None or not self.training:
            return original(self, *args, **kwargs)
        head = self.get_output_embeddings()
        setattr(head, _DEFER, True)
        try:
            return original(self, *args, **kwargs)
        finally:
            setattr(head, _DEFER, False)

    return forward


def _deferring_head(original: Callable[..., Any], kernel: Kernel) -> Callable[..., Any]:
    def forward(self: Any, input: Any) -> Any:
        if isinstance(input, _LossRequest):
            return kernel(
                input.hidden,
                self.weight,
                input.labels,
                bias=self.bias,
                ignore_index=input.ignore_index,
                num_items_in_batch=input.num_items,
            )
        if isinstance(input, LogitsRequest):
            return original(self, input.hidden)
        if self._veomni_defer_logits:
            return LazyLogits(input, self)
        return original(self, input)

    return forward


def _fused_loss(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def loss_function(
        logits: Any,
        labels: Any,
        vocab_size: int,
        num_items_in_batch: Any = None,
        ignore_index: int = _IGNORED,
        shift_labels: Any = None,
        **kwargs: Any,
    ) -> Any:
        if not isinstance(logits, LazyLogits):
            return original(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs)
        hidden, head = logits.hidden, logits.head
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        flat_labels = shift_labels.reshape(-1).to(hidden.device)
        request = _LossRequest(hidden.reshape(-1, hidden.shape[-1]), flat_labels, num_items_in_batch, ignore_index)
        return head(request)

    return loss_function


def _prove(model: Any) -> tuple[str | None, str]:
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if not isinstance(head, nn.Linear):
        return None, f"the output projection is {type(head).__name__}, expected a plain linear"
    if "labels" not in inspect.signature(current_forward(model)).parameters:
        return None, "its forward takes no labels"
    with probe.seeded():
        hidden = probe.random(2, 5, _HIDDEN).requires_grad_()
        tiny_head = nn.Linear(_HIDDEN, _VOCABULARY, bias=head.bias is not None)
        twin, why_not = probe.attempt(lambda: _twin(model, head, tiny_head, hidden))
        if why_not:
            return None, why_not
        labels = torch.randint(_VOCABULARY, (2, 5))
        labels[0, 3] = _IGNORED
        shifted = nn.functional.pad(labels, (0, 1), value=_IGNORED)[..., 1:].reshape(-1)
        for items in (None, 3):
            options = {} if items is None else {"num_items_in_batch": items}
            run = partial(type(model).forward, twin, input_ids=labels.abs(), labels=labels, **options)
            output, why_not = probe.attempt(run)
            if why_not:
                return None, why_not
            wanted = CONTRACTS["causal"].reference(
                hidden.reshape(-1, _HIDDEN), tiny_head.weight, shifted, tiny_head.bias, num_items_in_batch=items
            )
            if not probe.close(output.logits, tiny_head(hidden)):
                return None, "its logits are not lm_head(hidden): it does something in between"
            if not probe.close(output.loss, wanted):
                return None, f"its loss misses causal by {probe.largest_miss(output.loss, wanted):.1%}"
            if not probe.gradients_close(output.loss, wanted, (hidden, *tiny_head.parameters())):
                return None, "the gradients of its loss differ"
    return "causal", "its own head, run on a stand-in for the decoder, gave the reference's loss and gradients"


def _twin(model: Any, head: nn.Module, tiny_head: nn.Module, hidden: Tensor) -> nn.Module:
    """The model's head over a stand-in that returns ``hidden``; the decoder's own code is not run."""
    twin: Any = probe.bare_copy(model)
    for name, child in model.named_children():
        twin._modules[name] = tiny_head if child is head else _Decoder(hidden)
    twin.config = copy.copy(model.config)
    if twin.config.get_text_config() is model.config:
        raise LookupError("its config cannot be copied")
    twin.config.vocab_size = _VOCABULARY
    twin.config.output_router_logits = False
    twin.training = True
    probe.resize_attributes(twin, {model.config.get_text_config().vocab_size: _VOCABULARY})
    return twin  # type: ignore[no-any-return]


class _Decoder(nn.Module):
    """Returns fixed hidden states, whatever it is called with."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        from transformers.modeling_outputs import MoeModelOutputWithPast

        return MoeModelOutputWithPast(last_hidden_state=self.hidden)
