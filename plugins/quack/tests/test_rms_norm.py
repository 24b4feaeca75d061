"""RMSNorm on a GPU: QuACK's kernels against the contracts."""

from __future__ import annotations

import pytest
import torch
from quack_plugin import SPECS

from veomni_conformance import check_kernel

pytestmark = pytest.mark.gpu
NORMS = [spec for spec in SPECS if spec.op_name == "rms_norm"]


@pytest.mark.parametrize("spec,dtype", [(spec, dtype) for spec in NORMS for dtype in spec.dtypes], ids=str)
def test_conformance(spec, dtype):
    check_kernel(spec, "cuda", dtype).raise_if_failed()


def leaf(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype).requires_grad_()


@pytest.mark.parametrize("spec", NORMS, ids=str)
def test_compiles_without_a_graph_break(spec):
    torch._dynamo.reset()
    kernel, x = spec.load(), leaf(6, 5, 256)
    weight = None if spec.variant == "unweighted" else leaf(256, seed=1)
    leaves = [t for t in (x, weight) if t is not None]
    upstream = torch.randn_like(x)
    wanted = kernel(x, weight, 1e-6)
    found = torch.compile(kernel, fullgraph=True)(x, weight, 1e-6)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    pairs = (torch.autograd.grad(result, leaves, upstream) for result in (found, wanted))
    for mine, theirs in zip(*pairs, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("spec", [spec for spec in NORMS if spec.variant != "unweighted"], ids=str)
def test_a_float32_weight_beside_bf16(spec):
    from veomni_ops import rms_norm as reference

    x, weight = leaf(9, 384), leaf(384, dtype=torch.float32, seed=1)
    wanted = getattr(reference, spec.variant)(x, weight, 1e-6)
    found = spec.load()(x, weight, 1e-6)
    assert found.dtype == wanted.dtype
    upstream = torch.randn_like(wanted)
    torch.testing.assert_close(found, wanted, rtol=8e-3, atol=1e-6)
    pairs = (torch.autograd.grad(result, (x, weight), upstream) for result in (found, wanted))
    for mine, theirs in zip(*pairs, strict=True):
        assert mine.dtype == theirs.dtype
        assert (mine.double() - theirs.double()).norm() <= 6e-3 * theirs.double().norm()


@pytest.mark.parametrize("spec", NORMS, ids=str)
def test_gradients_that_arrive_strided(spec):
    """A slice of a wider gradient, of odd stride, as ``torch.cat`` sends it."""
    kernel, x = spec.load(), leaf(12, 128)
    weight = None if spec.variant == "unweighted" else leaf(128, seed=1)
    wide = torch.randn(12, 131, device="cuda", dtype=x.dtype)
    strided, whole = (
        torch.autograd.grad(kernel(x, weight, 1e-6), x, g)[0] for g in (wide[:, :128], wide[:, :128].clone())
    )
    assert torch.equal(strided, whole)
