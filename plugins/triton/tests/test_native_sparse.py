"""Native sparse attention's kernel against its contract, and its choice and its gradients in many parts."""

from __future__ import annotations

from dataclasses import astuple

import pytest
import torch

from veomni_conformance import check_kernel
from veomni_ops import native_sparse as ops
from veomni_ops import native_sparse_samples as samples
from veomni_ops.contract import Size
from veomni_triton import native_sparse
from veomni_triton.attention_launches import Launch
from veomni_triton.native_sparse import launches, operators
from veomni_triton.plugin import veomni_kernels

SPEC = next(spec for spec in veomni_kernels() if spec.name == "native-sparse")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter runs one element after the other.
SAMPLES = {} if DEVICE == "cuda" else {"largest": Size.SMALL, "every_form": False}
FEW = ops.Sizes(compress_length=4, compress_stride=2, block_size=4, block_count=3, last_blocks=1, window=5)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", SPEC.dtypes)
def test_conformance(dtype):
    check_kernel(SPEC, DEVICE, dtype, **SAMPLES).raise_if_failed()


@pytest.fixture
def in_parts(monkeypatch):
    """Tiles of 16, and wherever work is cut in parts, several of them."""
    monkeypatch.setattr(launches, "SMALL", Launch(16, 16, 4, 1))
    for name, value in {"_SUMS": 1, "SHARE": 2, "PART": 3}.items():
        monkeypatch.setattr(operators, name, value)


def problem(tied=False):
    problems = samples._Problems(torch.device(DEVICE), torch.float32)
    return problems.call(1, 27, (6, 2), (40, 16), FEW, lengths=(1, 21, 5), tied=tied)


@pytest.mark.parametrize("tied", [False, True], ids=["no ties", "ties"])
def test_the_choice_is_the_reference_s(in_parts, tied):
    (query, key, value, compressed_key, compressed_value, gates), options = problem(tied)
    bounds = options["cu_seq_lens"]
    places = ops.Places.of(27, bounds, FEW)
    _, weights = ops.attended_compressed(query, compressed_key, compressed_value, places, None)
    wanted = ops.chosen_blocks(weights.sum(2), places, ops.blocks_of(27, FEW), FEW)
    tensors = query, key, value, compressed_key, compressed_value, key, value, gates
    *_, chosen = torch.ops.veomni_triton.native_sparse_forward.default(*tensors, bounds, 40**-0.5, list(astuple(FEW)))
    assert torch.equal(chosen[0], wanted)


def test_gradients_in_parts(in_parts):
    call, options = problem()
    found, wanted = (
        torch.autograd.grad(kernel(*call, **options).square().sum(), call)
        for kernel in (native_sparse.native_sparse, ops.native_sparse)
    )
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
