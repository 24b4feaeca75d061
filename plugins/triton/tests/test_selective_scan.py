"""Mamba 1's scan against its contract, and what its parts promise."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from veomni_conformance import check_kernel
from veomni_ops.contract import Size
from veomni_ops.selective_scan import standard as recurrence
from veomni_triton import selective_scan as kernels
from veomni_triton.plugin import veomni_kernels
from veomni_triton.selective_scan import operators

SPEC = next(spec for spec in veomni_kernels() if spec.op_name == "selective_scan")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter runs one element after the other.
SAMPLES = {} if DEVICE == "cuda" else {"largest": Size.SMALL, "every_form": False}


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", SPEC.dtypes)
def test_conformance(dtype):
    check_kernel(SPEC, DEVICE, dtype, **SAMPLES).raise_if_failed()


def drawn(length=9, channels=5, state=3, dtype=torch.float32):
    """x, dt, A, B, C, D, z, the bias and initial states."""
    torch.manual_seed(0)
    x, dt, z = (torch.randn(1, channels, length, dtype=dtype) for _ in range(3))
    B, C = (torch.randn(1, state, length, dtype=dtype) for _ in range(2))
    A, states = -torch.rand(channels, state), torch.randn(1, channels, state)
    inputs = (x, dt, A, B, C, torch.randn(channels), z, torch.randn(channels) - 2.0, states)
    return [each.to(DEVICE).requires_grad_() for each in inputs]


def gradients(scan, inputs, **options):
    results = scan(*inputs, dt_softplus=True, return_final_states=True, **options)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(each.shape, generator=generator).to(DEVICE, each.dtype) for each in results]
    return [*results, *torch.autograd.grad(results, inputs, weights)]


def test_packed_rows_past_a_chunk_and_a_tile_of_channels_are_the_recurrence_s():
    inputs = drawn(67, 33)
    options = {"seq_idx": (torch.arange(67, device=DEVICE) // 22)[None]}
    exact = gradients(recurrence, [x.detach().double().requires_grad_() for x in inputs], **options)
    for mine, true in zip(gradients(kernels.standard, inputs, **options), exact, strict=True):
        assert (mine.double() - true).norm() <= 2e-6 * true.norm()


def test_no_result_depends_on_the_tokens_of_a_sub_block(monkeypatch):
    inputs, found = drawn(), []
    for tokens in (1, 4):
        for name in ("OUTPUTS", "GRADIENTS"):
            launch = replace(getattr(operators, name), numbers=32 * 4 * tokens)
            monkeypatch.setattr(operators, name, launch)
        found.append(gradients(kernels.standard, inputs))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_autograd_keeps_the_inputs_and_the_states_before_chunks():
    inputs, kept = drawn(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        kernels.standard(*inputs)
    others = [x for x in kept if x.data_ptr() not in {each.data_ptr() for each in inputs}]
    assert [tuple(x.shape) for x in others] == [(1, 1, 3, 5)]


def test_compiles_without_a_graph_break():
    inputs = drawn(3)

    def call(*inputs):
        return kernels.standard(*inputs, dt_softplus=True, return_final_states=True)

    wanted, found = call(*inputs), torch.compile(call, backend="aot_eager", fullgraph=True)(*inputs)
    weights = [torch.randn_like(x) for x in wanted]
    for mine, theirs in zip(
        (*found, *torch.autograd.grad(found, inputs, weights)),
        (*wanted, *torch.autograd.grad(wanted, inputs, weights)),
        strict=True,
    ):
        assert torch.equal(mine, theirs)


def test_other_dtypes_are_refused():
    x, *others = drawn(3)
    with pytest.raises(TypeError, match=r"an input is torch.float64; give float32, bfloat16 or float16"):
        kernels.standard(x.double(), *others)
