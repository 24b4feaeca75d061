"""Every load-balancing function in the installed transformers is one of the op's variants, proven by value."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from veomni_core import find_sites
from veomni_ops import load_balancing_loss as contract
from veomni_torch import load_balancing_loss as veomni_torch
from veomni_transformers.proving.functions import with_globals
from veomni_triton_moe import load_balancing_loss as veomni_triton_moe

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


KERNELS = {
    "the contract's standard": (contract.standard, (8, 2)),
    "the contract's product_keys": (contract.product_keys, (16, 4, 2)),
    "veomni-torch's standard": (veomni_torch.standard, (8, 2)),
    "veomni-torch's product_keys": (veomni_torch.product_keys, (16, 4, 2)),
    "veomni-triton-moe's standard": (veomni_triton_moe.standard, (8, 2)),
}


@pytest.mark.parametrize("kernel, arguments", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("gate_logits", [None, (), [torch.zeros(4, 8)]], ids=["None", "empty", "a list"])
def test_without_a_tuple_of_logits_the_loss_is_the_number_0(kernel, arguments, gate_logits):
    assert kernel(gate_logits, *arguments) == 0
    assert kernel(gate_logits, *arguments, torch.ones(2, 2)) == 0


@pytest.mark.parametrize("module", MODULES, ids=lambda name: name.rpartition(".")[2])
def test_transformers_functions_say_the_same(module):
    if module.endswith("switch_transformers"):
        pytest.skip("takes probabilities and routes, of which there is always one")
    arguments = (16, 4, 2) if module.endswith("doge") else (8, 2)
    assert getattr(importlib.import_module(module), NAME)(None, *arguments) == 0
