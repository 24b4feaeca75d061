"""What the adapter of fla's KDA changes: sums over states and over corrections, which fla rounds to 16 bits."""

from __future__ import annotations

import pytest
import torch

from veomni_fla.kda import final_state_of_float32, summed_in_float32


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


def corrected_as_loaded(*, k, u, output_final_state):
    """As fla's kernel: corrections are rounded to the keys' dtype, and products summed in float32."""
    state = torch.einsum("tk,tv->kv", k.float(), u.to(k.dtype).float())
    return state if output_final_state else u.to(k.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_final_state_has_corrections_in_float32_and_training_those_of_fla(dtype):
    k, u = torch.full((2, 1), 0.5, dtype=dtype), torch.tensor([[1.0 + 2**-12], [-1.0]])
    assert corrected_as_loaded(k=k, u=u, output_final_state=True) == 0.0
    mended = final_state_of_float32(corrected_as_loaded)
    assert mended(k=k, u=u, output_final_state=True) == 2**-13
    assert mended(k=k, u=u, output_final_state=False).dtype == dtype
