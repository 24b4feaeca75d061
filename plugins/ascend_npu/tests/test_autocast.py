"""Float32 weights under autocast, which knows none of torch_npu's operators that these kernels call."""

from __future__ import annotations

import pytest
import torch

from veomni_npu import cross_entropy_loss, moe_experts
from veomni_ops import cross_entropy_loss as loss_reference
from veomni_ops import moe_experts as experts_reference

CALLS = {
    "cross_entropy_loss": (
        lambda op: lambda h, w: op.causal(h, w, (torch.arange(30) % 11).to(h.device)),
        (cross_entropy_loss, loss_reference),
        [(30, 8), (11, 8)],
    ),
    "moe_experts": (
        lambda op: lambda h, w, u, d: op.standard(h, (torch.arange(14).view(7, 2) % 4).to(h.device), w, u, d),
        (moe_experts, experts_reference),
        [(7, 8), (7, 2), (4, 12, 8), (4, 8, 6)],
    ),
}


@pytest.mark.parametrize("call, ops, shapes", CALLS.values(), ids=CALLS)
def test_float32_inputs_are_multiplied_in_autocasts_dtype(npu, call, ops, shapes):
    torch.manual_seed(0)
    inputs = [torch.randn(*shape).to(npu).requires_grad_() for shape in shapes]
    wanted = call(ops[1])(*inputs)
    with torch.autocast(npu, torch.bfloat16):
        found = call(ops[0])(*inputs)
    upstream = torch.randn(wanted.shape).to(npu)
    results = [[result, *torch.autograd.grad(result, inputs, upstream)] for result in (found, wanted)]
    for mine, theirs in zip(*(map(torch.Tensor.cpu, each) for each in results), strict=True):
        assert mine.dtype == torch.float32
        assert (mine - theirs).norm() <= 1.6e-2 * theirs.norm()
    assert (results[0][1].cpu() - results[1][1].cpu()).norm() > 1e-5 * results[1][1].cpu().norm()
