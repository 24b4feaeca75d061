"""Small random inputs where Liger's kernels run: on the GPU, or in the interpreter."""

from __future__ import annotations

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def leaf(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE).to(dtype).requires_grad_()


def labels_of(count, classes):
    labels = torch.arange(count, device=DEVICE) % classes
    labels[1] = -100
    return labels
