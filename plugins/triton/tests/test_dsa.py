"""Sparse attention's kernels against their contracts, and what a model's layer gets of them."""

from __future__ import annotations

import pytest
import torch

from veomni_conformance import check_kernel
from veomni_ops import dsa_attention as attention
from veomni_ops import dsa_indexer as indexer
from veomni_ops.contract import Size
from veomni_triton import dsa_attention, dsa_indexer
from veomni_triton.dsa_attention import operators
from veomni_triton.plugin import veomni_kernels

SPECS = [spec for spec in veomni_kernels() if spec.op_name.startswith("dsa_")]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter runs one element after the other.
SAMPLES = {} if DEVICE == "cuda" else {"largest": Size.SMALL, "every_form": False}


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", SPECS[0].dtypes)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_conformance(spec, dtype):
    check_kernel(spec, DEVICE, dtype, **SAMPLES).raise_if_failed()


@pytest.mark.parametrize("tied", [False, True], ids=["no ties", "ties"])
@pytest.mark.parametrize("block", [1, 1 << 26], ids=["a tile of queries at a time", "all at once"])
def test_no_choice_depends_on_the_blocks_of_queries(monkeypatch, tied, block):
    monkeypatch.setattr(dsa_indexer, "_SCORES", block)
    monkeypatch.setattr(dsa_indexer, "_ROW_TILE", 16)  # several tiles of a row
    problems = indexer._Problems(torch.device(DEVICE), torch.float32)
    call = problems.call(1, 39, 9, lengths=(3, 36), tied=tied)
    assert torch.equal(dsa_indexer.standard(*call), indexer.standard(*call))


@pytest.mark.parametrize("last_bits", range(4))
def test_of_equal_scores_the_first_are_chosen_whatever_their_last_bits_are(last_bits):
    """The search goes on by two bits, and counts what is higher by the last candidate that it refused."""
    # 1.0 and the numbers that follow it, in float32's order: the tied one, and three that are just above.
    tied, *above = (torch.arange(4, dtype=torch.int32) + 0x3F800000 + last_bits).view(torch.float32).tolist()
    key = torch.full((1, 40, 1), tied, device=DEVICE)
    key[0, [3, 17, 30], 0] = torch.tensor(above, device=DEVICE)
    key[0, [5, 11]] = 0.5
    one = torch.ones(1, 1, 1, device=DEVICE)
    ranges = torch.tensor([[[0, 40]]], dtype=torch.int32, device=DEVICE)
    found = dsa_indexer.standard(one[..., None], key, one, ranges, 9)
    assert found.tolist() == [[[0, 1, 2, 3, 4, 6, 7, 17, 30]]]


@pytest.mark.parametrize("weights", [1, 1100, 1 << 24], ids=["a query at a time", "some", "all at once"])
def test_keys_and_queries_get_their_gradients(monkeypatch, weights):
    for name in ("_WEIGHTS", "_WEIGHTS_BACKWARD"):
        monkeypatch.setattr(operators, name, weights)
    problems = attention._Problems(torch.device(DEVICE), torch.float32)
    query, keys, *rest = problems.call(2, 7, 20, heads=18, widths=(40, 24), keys=30)  # several tiles of each
    found, wanted = (
        torch.autograd.grad(kernel(query, keys, *rest).square().sum(), (query, keys))
        for kernel in (dsa_attention.standard, attention.standard)
    )
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_queries_of_few_keys_get_gradients_of_the_output_before_it_was_rounded():
    """Keys have much in common here, which a rounded output holds less exactly than what they differ in."""
    problems = attention._Problems(torch.device(DEVICE), torch.float16)
    query, keys, *rest = problems.call(1, 6, 4, heads=3, widths=(16, 16), keys=9)
    keys = (32 + keys.detach()).requires_grad_()
    output = dsa_attention.standard(query, keys, *rest)
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(0)).to(output)
    (found,) = torch.autograd.grad(output, query, upstream)
    exact = query.detach().double().requires_grad_()
    (wanted,) = torch.autograd.grad(attention.standard(exact, keys.double(), *rest), exact, upstream.double())
    assert (found - wanted).norm() < 0.1 * wanted.norm()


def test_a_scale_that_is_not_positive_is_refused():
    problems = attention._Problems(torch.device(DEVICE), torch.float32)
    query, keys, indices, _, value_width = problems.call(1, 5, 3)
    with pytest.raises(ValueError, match="takes positive ones; choose torch"):
        dsa_attention.standard(query, keys, indices, -1.0, value_width)


def test_the_indexers_loss_in_blocks_of_queries(monkeypatch):
    monkeypatch.setattr(dsa_attention, "_NUMBERS", 1)
    problems = attention._Problems(torch.device(DEVICE), torch.float32)
    call = problems.call(2, 7, 20, heads=18, widths=(40, 24), keys=30)
    index = problems.indexer(call)
    (found, mine), (wanted, theirs) = (
        (loss, torch.autograd.grad(loss.square().sum(), list(index.values())))
        for loss in (kernel(*call, **index)[1] for kernel in (dsa_attention.standard, attention.standard))
    )
    torch.testing.assert_close((found, *mine), (wanted, *theirs), rtol=1e-4, atol=1e-5)
