"""Every load-balancing function in the installed transformers is one of the op's variants, proven by value."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import transformers
from torch import nn

from veomni_core import find_sites
from veomni_core.sites.functions import with_globals

NAME = "load_balancing_loss_func"
MODELS = Path(transformers.__file__).parent / "models"
MODULES = sorted(
    f"transformers.models.{path.parent.name}.{path.stem}"
    for path in MODELS.glob("*/modeling_*.py")
    if f"def {NAME}(" in path.read_text(encoding="utf-8")
)
OTHERS = {"modeling_doge": "product_keys", "modeling_switch_transformers": "given_routes"}


def load_balancing_loss_func(*arguments):
    """Stands where a modeling file has its own."""
    raise NotImplementedError


class Caller(nn.Module):
    def forward(self, *arguments):
        return load_balancing_loss_func(*arguments)


def test_there_are_as_many_as_were_counted():
    assert len(MODULES) >= 33


@pytest.mark.parametrize("module", MODULES, ids=lambda name: name.rpartition(".")[2])
def test_its_function_is_a_variant(module):
    function = getattr(importlib.import_module(module), NAME)
    kind = type("Caller", (Caller,), {"forward": with_globals(Caller.forward, {NAME: function})})
    (site,) = find_sites(kind())
    assert site.variant == OTHERS.get(module.rpartition(".")[2], "standard"), site.evidence
