"""The walk over a model's modules is ``named_modules`` of PyTorch."""

from __future__ import annotations

import pytest
from torch import nn

from models import build
from veomni_core.sites.walk import named_modules


def _tangled() -> nn.Module:
    shared = nn.Linear(2, 2)
    model = nn.Sequential(nn.ModuleList([shared, nn.Sequential(shared, nn.ReLU())]), nn.ReLU(), shared)
    model.register_module("absent", None)
    model[1].around = nn.ModuleDict({"again": model[0], "own": nn.Identity()})
    return model


@pytest.mark.parametrize("make", [_tangled, lambda: build("qwen3_moe")], ids=["tangled", "qwen3_moe"])
def test_the_same_modules_by_the_same_paths_in_the_same_order(make):
    model = make()
    assert named_modules(model) == list(model.named_modules())
