"""Operands that lie as a kernel of 16 bytes takes them are handed over as they are, and others as copies that do."""

from __future__ import annotations

import pytest
import torch

from veomni_core.kernels import aligned, empty_like_aligned, is_aligned


def numbers(*shape, dtype=torch.bfloat16):
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape).to(dtype)


TAKEN = {
    "contiguous": numbers(3, 5, 16),
    "columns at a multiple of 16 bytes": numbers(3, 5, 32)[..., 8:24],
    "heads and positions swapped": numbers(3, 5, 16).transpose(0, 1),
    "a vector": numbers(7),
    "float32 in rows of 16 bytes": numbers(5, 4, dtype=torch.float32),
}
COPIED = {
    "one element behind": numbers(3 * 5 * 16 + 1)[1:].view(3, 5, 16),
    "one element behind, swapped": numbers(3 * 5 * 16 + 1)[1:].view(5, 3, 16).transpose(0, 1),
    "columns of a larger tensor": numbers(3, 5, 25)[..., 8:24],
    "every second element": numbers(3, 5, 32)[..., ::2],
    "transposed in memory": numbers(16, 5, 3).transpose(0, 2),
    "repeated rows": numbers(1, 5, 16).expand(3, 5, 16),
    "the gradient of a sum": torch.ones((), dtype=torch.bfloat16).expand(3, 5, 16),
    "rows of an odd width": numbers(3, 5, 7),
    "one row of a wider tensor": numbers(1, 25)[:, :16],
    "a part of a vector": numbers(9)[1:],
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_lies_well_is_not_copied(name):
    assert aligned(TAKEN[name]) is TAKEN[name] and is_aligned(TAKEN[name])


@pytest.mark.parametrize("name", COPIED)
def test_what_lies_elsewhere_is_copied_to_where_it_is_taken(name):
    found = aligned(COPIED[name])
    assert not is_aligned(COPIED[name]) and is_aligned(found)
    assert found.data_ptr() % 16 == 0
    assert found.stride(-1) == 1 and all(stride % 8 == 0 and stride > 0 for stride in found.stride()[:-1])
    assert torch.equal(found, COPIED[name])


def test_repeated_rows_and_shorter_units_are_taken_where_the_kernel_takes_them():
    assert aligned(COPIED["repeated rows"], expanded=True) is COPIED["repeated rows"]
    assert aligned(COPIED["rows of an odd width"], alignment=2) is COPIED["rows of an odd width"]


@pytest.mark.parametrize("part", [lambda x: x[..., 1:17], lambda x: x[..., :7], lambda x: x.transpose(0, 2)])
def test_gradients_pass_through_a_copy(part):
    whole = torch.randn(16, 5, 25, requires_grad=True)
    assert aligned(part(whole)) is not part(whole)
    weight = torch.randn(part(whole).shape)
    found, wanted = (
        torch.autograd.grad((taken * weight).sum(), whole)[0] for taken in (aligned(part(whole)), part(whole))
    )
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("name", [*TAKEN, *COPIED])
def test_memory_for_a_gradient_has_the_layout_of_the_operand_that_is_handed_over(name):
    operand = (TAKEN | COPIED)[name]
    if operand.shape[-1] % 8 == 0:
        assert empty_like_aligned(operand).stride() == torch.empty_like(aligned(operand)).stride()


@pytest.mark.parametrize("name", [*TAKEN, *COPIED])
def test_strides_alone_are_looked_at_while_a_graph_is_traced(name):
    torch._dynamo.reset()
    operand = (TAKEN | COPIED)[name]
    compiled = torch.compile(aligned, fullgraph=True, backend="aot_eager")
    found = compiled(operand)
    assert torch.equal(found, operand)
    assert found.stride() == aligned(operand).stride()


def test_tensors_without_memory_are_left_where_they_are():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        operand = torch.empty(2, 8)
        assert aligned(operand) is operand
    assert torch.equal(torch.func.vmap(aligned)(numbers(3, 8)), numbers(3, 8))
    on_meta = torch.empty(2, 16, device="meta")[:, 1:9]
    assert aligned(on_meta).shape == (2, 8)
