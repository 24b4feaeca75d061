"""One call of an output projection, whose logits are eager or deferred, and the comparison of both."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from veomni_ops import cross_entropy_loss
from veomni_transformers.forwards.deferred_logits import deferred_logits
from veomni_transformers.forwards.head_call import HeadCall

HIDDEN, VOCABULARY, IGNORED = 8, 11, -100


class Head:
    """One call of an output projection, eager or deferred, with labels for it. ``asked`` are the kernel's options."""

    def __init__(self, deferred: bool, *shape: int, dtype: torch.dtype = torch.float32) -> None:
        draw = torch.Generator().manual_seed(0)
        sizes = (*(shape or (2, 5)), HIDDEN), (VOCABULARY, HIDDEN), (VOCABULARY,)
        self.leaves = [torch.randn(size, generator=draw).to(dtype).requires_grad_() for size in sizes]
        self.labels = torch.randint(VOCABULARY, sizes[0][:-1], generator=draw)
        self.labels.view(-1)[2] = IGNORED
        self.asked: list[dict] = []
        self.call = HeadCall(*self.leaves, self._kernel) if deferred else None
        self.logits = deferred_logits(self.call, *self.leaves) if self.call else F.linear(*self.leaves)

    def _kernel(self, *args, **options):
        self.asked.append(options)
        return cross_entropy_loss.causal(*args, **options)

    def leave_forward(self) -> None:
        """The model's forward is over."""
        if self.call:
            self.call.open = False

    def loss(self, between=lambda logits: logits, **options) -> torch.Tensor:
        """As transformers takes it: shifted, in float32."""
        logits = between(self.logits).float()[..., :-1, :].contiguous().view(-1, VOCABULARY)
        labels = self.labels[..., 1:].reshape(-1)
        labels = labels.masked_fill(labels == IGNORED, options.get("ignore_index", IGNORED))
        return F.cross_entropy(logits, labels, **options)


def both(run, dtype: torch.dtype = torch.float32):
    """What ``run`` gives, and the leaves' gradients after it, with deferred and with eager logits."""
    outcomes = []
    for deferred in (True, False):
        head = Head(deferred, dtype=dtype)
        result = run(head)
        outcomes.append((result, [leaf.grad for leaf in head.leaves]))
    return outcomes


def assert_like_eager(run, dtype: torch.dtype = torch.float32) -> None:
    (found, gradients), (wanted, wanted_gradients) = both(run, dtype)
    torch.testing.assert_close(found, wanted)
    for gradient, wanted_gradient in zip(gradients, wanted_gradients, strict=True):
        torch.testing.assert_close(gradient, wanted_gradient)


def backward(loss: torch.Tensor) -> torch.Tensor:
    loss.backward()
    return loss.detach()
