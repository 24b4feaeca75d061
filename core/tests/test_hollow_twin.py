"""Copies without memory, which show what a module passes on."""

from __future__ import annotations

import torch
from torch import nn

from veomni_core.sites.proofs.hollow_twin import LinearsOfZeros, hollow_twin


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


def test_on_meta_it_stays_there():
    """Parts of layers are run on meta: a result elsewhere would fail there, and send the part to the CPU."""
    weight = torch.zeros((), device="meta").expand(3, 5)
    with LinearsOfZeros():
        assert nn.functional.linear(torch.empty(2, 5, device="meta"), weight).device.type == "meta"


def test_other_linears_are_computed():
    x, weight, bias = torch.ones(2, 5), torch.full((3, 5), 2.0), torch.ones(3)
    with LinearsOfZeros():
        torch.testing.assert_close(nn.functional.linear(x, weight, bias), torch.full((2, 3), 11.0))
        torch.testing.assert_close(nn.functional.linear(x, weight=weight), torch.full((2, 3), 10.0))
