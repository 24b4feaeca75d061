"""Copies without memory, which show what a module passes on."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, FalconH1Config, JetMoeConfig

from veomni_core import find_sites
from veomni_transformers.proving.hollow_twin import BATCH, LENGTH, LinearsOfZeros, hollow_twin


class CallsLinearItself(nn.Module):
    """As experts do whose projections are one parameter: JetMoe's, which are within its attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3, width))

    def forward(self, x):
        first, second = x.chunk(2)
        return torch.cat([nn.functional.linear(first, self.weight[0]), nn.functional.linear(second, self.weight[1])])


def test_a_linear_of_expanded_zeros_writes_none_of_them_out():
    with torch.device("meta"):
        module = CallsLinearItself(1 << 40)  # two terabytes for each expert
    x = torch.zeros((), dtype=torch.bfloat16).expand(4, 1 << 40)
    with torch.no_grad(), LinearsOfZeros():
        result = hollow_twin(module)(x)
    assert result.shape == (4, 3) and result.dtype == torch.bfloat16 and not result.any()


def test_an_argument_that_is_unknown_counts_as_some_positions():
    linear = hollow_twin(nn.Linear(5, 3))
    assert linear(None).shape == linear().shape == (BATCH, LENGTH, 3)


def test_on_meta_its_zeros_stay_there():
    """Parts of layers are run on meta: a result elsewhere would fail there, and send the part to the CPU."""
    twin = hollow_twin(nn.Sequential(nn.Conv1d(5, 7, 1), nn.Flatten(1), nn.Linear(28, 3)))
    assert twin(torch.empty(2, 5, 4, device="meta")).device.type == "meta"
    x, weight = torch.empty(2, 5, device="meta"), torch.zeros((), device="meta").expand(3, 5)
    with LinearsOfZeros():
        assert nn.functional.linear(x, weight).device.type == "meta"
        assert nn.functional.linear(input=x, weight=weight).device.type == "meta"


class Products(TorchDispatchMode):
    """Keeps the numbers of elements that matrix products on the CPU were given."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "mm" in func.name() or "linear" in func.name():
            self.elements += [
                each.numel() for each in args if isinstance(each, torch.Tensor) and each.device.type == "cpu"
            ]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "config", [JetMoeConfig(num_hidden_layers=2), FalconH1Config(num_hidden_layers=2)], ids=["jetmoe", "falcon_h1"]
)
def test_finding_sites_multiplies_no_weights_of_a_model_s_size(config):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with Products() as products:
        found = find_sites(model)
    assert [site for site in found if site.op_name == "rotary_pos_emb" and site.variant]
    assert 0 < max(products.elements) < 1_000_000


def test_other_linears_are_computed():
    x, weight, bias = torch.ones(2, 5), torch.full((3, 5), 2.0), torch.ones(3)
    with LinearsOfZeros():
        torch.testing.assert_close(nn.functional.linear(x, weight, bias), torch.full((2, 3), 11.0))
        torch.testing.assert_close(nn.functional.linear(x, weight=weight), torch.full((2, 3), 10.0))
        assert nn.functional.linear(x, torch.zeros(()).expand(5)).shape == (2,)  # a vector is no matrix of one row
