"""A tiny module, and forwards to put into it."""

from __future__ import annotations

import torch
from torch import nn

from veomni_core.changes.change import ForwardChange
from veomni_core.changes.change_set import ChangeSet


class Scale(nn.Module):
    """``factor * weight * x``."""

    factor = 1.0

    def __init__(self, weight: float = 2.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([weight]))
        self.eps = 0.0

    def forward(self, x):
        return self.weight * x + self.eps


class Twice(nn.Module):
    def forward(self, x):
        return 2 * x


def times(number):
    def forward(self, x):
        return number * self.weight * x

    return forward


def plus_one(previous):
    def forward(self, x):
        return previous(self, x) + 1

    return forward


X = torch.ones(1)


def bound(module, *forwards, guarded=(), on_change="raise"):
    changes = ChangeSet(on_change)
    for forward in forwards:
        changes.apply(ForwardChange(module, forward, guarded), "it", "a rule")
    return changes


def value(module):
    return float(module(X))
