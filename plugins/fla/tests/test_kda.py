"""What the adapter of fla's KDA changes: the sum over states that is part of the decay's gradient."""

from __future__ import annotations

import pytest
import torch

from veomni_fla.kda import summed_in_float32


def summed_as_loaded(*, h, dh):
    """As fla's kernel sums: what it has loaded is multiplied and added up in the dtype that this has."""
    products = h * dh
    total = torch.zeros_like(products[..., 0])
    for column in products.unbind(-1):
        total = total + column
    return total


@pytest.mark.parametrize("dtype, allowed", [(torch.bfloat16, 1e-1), (torch.float16, 1.5e-2)], ids=str)
def test_the_states_part_of_a_decays_gradient_is_summed_in_float32(dtype, allowed):
    generator = torch.Generator().manual_seed(0)
    h, dh = (torch.randn(512, 128, generator=generator).to(dtype) for _ in range(2))
    exact = (h.double() * dh.double()).sum(-1)
    scale = exact.square().mean().sqrt()

    def worst(total):
        return float(((total.double() - exact).abs() / (exact.abs() + scale)).max())

    assert worst(summed_as_loaded(h=h, dh=dh)) > allowed / 4  # alone, before any other rounding
    assert worst(summed_in_float32(summed_as_loaded)(h=h, dh=dh)) < 1e-5
