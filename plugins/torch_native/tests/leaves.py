"""Random tensors that take a gradient."""

from __future__ import annotations

import torch


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)
