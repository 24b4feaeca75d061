"""Rotary position embedding on a GPU: QuACK's kernel against the contracts."""

from __future__ import annotations

import pytest
import torch
from quack_plugin import SPECS, spec_of

from veomni_conformance import check_kernel
from veomni_ops import rotary_pos_emb as reference
from veomni_ops.catalog import OPS
from veomni_ops.contract import contract_for

pytestmark = pytest.mark.gpu
ROTATIONS = [spec for spec in SPECS if spec.op_name == "rotary_pos_emb"]
OP = next(op for op in OPS if op.name == "rotary_pos_emb")


@pytest.mark.parametrize("spec,dtype", [(spec, dtype) for spec in ROTATIONS for dtype in spec.dtypes], ids=str)
def test_conformance(spec, dtype):
    check_kernel(spec, "cuda", dtype).raise_if_failed()


@pytest.mark.parametrize("spec", ROTATIONS, ids=str)
def test_compiles_without_a_graph_break(spec):
    torch._dynamo.reset()
    kernel = spec.load()
    sample = next(contract_for(OP, spec.variant).samples(torch.device("cuda"), torch.bfloat16))
    leaves = [tensor for tensor in sample.args if tensor.requires_grad]

    def run(call):
        results = call(*sample.args)
        results = results if isinstance(results, tuple) else (results,)
        upstream = [torch.ones_like(result) for result in results]
        return *(result.detach() for result in results), *torch.autograd.grad(results, leaves, upstream)

    for mine, theirs in zip(run(torch.compile(kernel, fullgraph=True)), run(kernel), strict=True):
        assert torch.equal(mine, theirs)


def test_angles_of_their_own_for_each_sequence():
    """Positions that differ between sequences: the table of angles is read from each sequence's start."""
    torch.manual_seed(0)
    q, k = (torch.randn(3, heads, 130, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 2))
    angles = torch.randn(3, 130, 32, device="cuda").repeat(1, 1, 2)
    wanted = reference.full(q, k, angles.cos(), angles.sin())
    found = spec_of("rotary_pos_emb", "full").load()(q, k, angles.cos(), angles.sin())
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=8e-3, atol=1e-3)


def test_a_head_that_is_too_wide_is_refused_before_anything_runs():
    x, angles = torch.randn(1, 2, 5, 520, device="cuda"), torch.zeros(1, 5, 520, device="cuda")
    with pytest.raises(ValueError, match=r"heads of at most 512 dimensions, this head has 520"):
        spec_of("rotary_pos_emb", "full").load()(x, x, angles, angles)


def test_angles_of_the_wrong_width_and_other_layouts_are_refused():
    full = spec_of("rotary_pos_emb", "full").load()
    x, narrow, wide = (torch.randn(*shape, device="cuda") for shape in ((1, 2, 5, 32), (1, 5, 16), (1, 5, 32)))
    with pytest.raises(ValueError, match="cos covers 16 of a head's 32 dimensions"):
        full(x, x, narrow, narrow)
    with pytest.raises(ValueError, match="unsqueeze_dim is 0, expected 1 or 2"):
        full(x, x, wide, wide, unsqueeze_dim=0)
