"""What the contract can't ask of Liger's experts: a real shape, and routes that are dropped."""

from __future__ import annotations

import pytest
import torch
from small_inputs import DEVICE, leaf

from veomni_liger import moe_experts
from veomni_ops import moe_experts as experts_reference


@pytest.mark.gpu
def test_experts_of_a_real_shape_are_close_to_the_reference():
    torch.manual_seed(0)
    tokens, hidden, intermediate, experts, k = 4096, 2048, 768, 128, 8
    index = torch.rand(tokens, experts, device="cuda").topk(k).indices
    index[::7, 0] = experts  # dropped
    bf16 = {"dtype": torch.bfloat16}
    arguments = [
        leaf(tokens, hidden, **bf16),
        torch.rand(tokens, k, device="cuda").bfloat16().requires_grad_(),
        (leaf(experts, 2 * intermediate, hidden, **bf16) * hidden**-0.5).detach().requires_grad_(),
        (leaf(experts, hidden, intermediate, **bf16) * intermediate**-0.5).detach().requires_grad_(),
    ]
    exact = [tensor.detach().double().requires_grad_() for tensor in arguments]
    found = moe_experts.standard(arguments[0], index, *arguments[1:])
    wanted = experts_reference.standard(exact[0], index, *exact[1:])
    upstream = torch.randn_like(found)
    mine = (found, *torch.autograd.grad(found, arguments, upstream))
    theirs = (wanted, *torch.autograd.grad(wanted, exact, upstream.double()))
    for a, b in zip(mine, theirs, strict=True):
        assert (a.double() - b).norm() <= 1.5e-2 * b.norm()
    assert not mine[2][index == experts].any()


def test_what_a_dropped_route_is_sent_to_instead_adds_nothing_even_where_it_is_infinite():
    torch.manual_seed(0)
    experts, hidden, intermediate = 3, 16, 16
    half = {"dtype": torch.bfloat16, "device": DEVICE}
    index = torch.tensor([[3, 2], [1, 3], [3, 3], [2, 1]], device=DEVICE)  # expert 3 is none; nobody chose expert 0
    arguments = [
        torch.randn(4, hidden, **half),
        torch.rand(4, 2, **half),
        torch.randn(experts, 2 * intermediate, hidden, **half),
        torch.randn(experts, hidden, intermediate, **half),
    ]
    arguments[0][2] = torch.inf  # of the token whose routes are all dropped
    arguments[2][0], arguments[3][0] = torch.inf, -torch.inf
    for each in arguments:
        each.requires_grad_()
    results = []
    for function in (moe_experts.standard, experts_reference.standard):
        result = function(arguments[0], index, *arguments[1:])
        results.append((result, *torch.autograd.grad(result, arguments, torch.ones_like(result))))
    for found, wanted in zip(*results, strict=True):
        assert (found.double() - wanted.double()).norm() <= 2e-2 * wanted.double().norm()


def test_nothing_is_computed_where_all_routes_are_dropped():
    shapes = (5, 16), (5, 2), (3, 32, 16), (3, 16, 16)
    arguments = [torch.full(shape, torch.inf, dtype=torch.bfloat16, device=DEVICE).requires_grad_() for shape in shapes]
    found = moe_experts.standard(arguments[0], torch.full((5, 2), 3, device=DEVICE), *arguments[1:])
    for each in (found, *torch.autograd.grad(found.sum(), arguments)):
        assert each.eq(0).all()
