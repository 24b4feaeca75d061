"""One call of an output projection whose logits are not computed yet.

Shape suffixes: ``H`` hidden width, ``V`` vocabulary, ``...`` positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from veomni_core.errors import LogitsGoneError, ShardedLogitsError
from veomni_core.kernels import autocast_dtype
from veomni_transformers.forwards.gathered_weight import gathered, is_in_memory
from veomni_transformers.forwards.vocabulary_shard import VocabularyShard

Kernel = Callable[..., Any]

_READ_FIRST = (
    "Read outputs.logits before that (a cast to float32 alone reads nothing), call the model in eval() or without "
    "labels, or write `training_logits: computed` under ops_implementation to have them in every training step"
)
_SHARDED = (
    "the logits of this training step were not computed: the output projection's words are sharded over {} ranks, and "
    "its loss does without gathering them. Write `training_logits: computed` under ops_implementation for steps that "
    "gather the logits and take the model's own loss of them, or call the model in eval() or without labels"
)
# Writing through `.data` moves no version counter, so this many of the weight's numbers are compared. A write to other
# rows goes unseen: a sum of all numbers would read the whole weight in every step.
_SAMPLED = 64


class HeadCall:
    """The values of one call: ``hidden[..., H]``, ``weight[V, H]``, ``bias[V]`` and the autocast state.

    ``inputs`` are detached leaves over the same memory; a fused loss sends its gradients to them. ``open`` is True
    while the model's forward runs; only then losses are fused. ``fused`` counts the fused losses. ``head`` is the
    module that was called; through it FSDP2 gathers a weight that it has sharded again. With a ``shard``, weight and
    bias are this rank's part of the vocabulary, and ``kernel`` computes its part of the loss.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        kernel: Kernel,
        head: nn.Module | None = None,
        shard: VocabularyShard | None = None,
    ) -> None:
        self.kernel, self._head, self._shard = kernel, head, shard
        self.vocabulary = weight.shape[0] if shard is None else shard.words
        self.open, self.fused = True, 0
        self.hidden, self.weight, self.bias = (None if each is None else _leaf(each) for each in (hidden, weight, bias))
        self.device = hidden.device
        self._autocast_dtype = autocast_dtype(hidden.device.type)
        self.dtype = self._autocast_dtype or hidden.dtype
        self._versions = self._current_versions()
        self._sample = _sample(weight)

    @property
    def inputs(self) -> tuple[Tensor | None, ...]:
        """Hidden states, weight and bias."""
        return self.hidden, self.weight, self.bias

    def compute_logits(self) -> Tensor:
        """``[..., V]``, as the head's own code would have computed them in the call, without a graph.

        Raises:
            LogitsGoneError: the weight or the hidden states are not those of the call any more.
            ShardedLogitsError: each rank has the logits of a part of the vocabulary.
        """
        if self._shard is not None:
            raise ShardedLogitsError(_SHARDED.format(self._shard.ranks))
        self._check()
        with torch.no_grad(), self._autocast(self._autocast_dtype):
            return F.linear(*self.inputs)  # type: ignore[arg-type]

    def run_kernel(self, rows: Tensor, labels: Tensor, **options: Any) -> Any:
        """What the kernel gives for ``rows[T, H]`` and ``labels[T]``, in a graph that ends at ``inputs``."""
        self.fused += 1
        weight, bias = self.weight, self.bias
        with gathered(self._head, self.weight), self._autocast(None):  # type: ignore[arg-type]
            if self._autocast_dtype is not None:
                rows, weight = rows.to(self.dtype), weight.to(self.dtype)  # type: ignore[union-attr]
                bias = None if bias is None else bias.to(self.dtype)
            labels = labels.to(self.device)
            if self._shard is not None:
                return self._shard.loss(self.kernel, rows, weight, labels, bias=bias, **options)  # type: ignore[arg-type]
            return self.kernel(rows, weight, labels, bias=bias, **options)  # type: ignore[no-any-return]

    def gradients(self, results: Sequence[Tensor], upstream: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """The gradients of hidden states, weight and bias, from the ``upstream`` ones of a kernel's ``results``."""
        wanted = [each for each in self.inputs if each is not None and each.requires_grad]
        keep = torch._C._autograd._get_current_graph_task_keep_graph()  # type: ignore[attr-defined]
        found = torch.autograd.grad(results, wanted, upstream, retain_graph=keep)
        by_input = dict(zip(map(id, wanted), found, strict=True))
        return tuple(by_input.get(id(each)) for each in self.inputs)

    def _autocast(self, dtype: torch.dtype | None) -> Any:
        if not torch.amp.is_autocast_available(self.device.type):
            return nullcontext()
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None, cache_enabled=False)

    def _current_versions(self) -> list[int | None]:
        # Inference-mode tensors have no version counter; outside of that mode they can't be written.
        return [None if each is None or each.is_inference() else each._version for each in self.inputs]

    def _check(self) -> None:
        if not is_in_memory(self.weight):  # type: ignore[arg-type]
            what = "the output projection's weight was sharded again since"
        elif self._versions != self._current_versions() or not torch.equal(_sample(self.weight), self._sample):
            what = "the output projection's weight was changed since, by optimizer.step() for instance"
        else:
            return
        raise LogitsGoneError(f"the logits of this training step were not computed, and {what}. {_READ_FIRST}")


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad and torch.is_grad_enabled())


def _sample(weight: Any) -> Tensor:
    """Some numbers of ``weight[V, H]``, at an odd step, so that they come from many columns."""
    weight = weight.detach()
    numbers = weight.view(-1) if weight.is_contiguous() else weight[:, 0]
    return numbers[:: numbers.numel() // _SAMPLED | 1].clone()
