"""The gated activation against its contract, in any layout, and under ``torch.compile``."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from veomni_conformance import check_kernel
from veomni_ops import swiglu_mlp as reference
from veomni_ops.contract import Size
from veomni_triton import swiglu_mlp as kernels
from veomni_triton.plugin import veomni_kernels

SPECS = [spec for spec in veomni_kernels() if spec.op_name == "swiglu_mlp"]
CASES = [pytest.param(spec, dtype, id=f"{spec}-{dtype}") for spec in SPECS for dtype in spec.dtypes]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter runs one element after the other.
SAMPLES = {} if DEVICE == "cuda" else {"largest": Size.SMALL, "every_form": False}


@pytest.mark.thorough(one_per=["spec"])
@pytest.mark.parametrize("spec, dtype", CASES)
def test_conformance(spec, dtype):
    check_kernel(spec, DEVICE, dtype, **SAMPLES).raise_if_failed()


@given(
    rows=st.integers(1, 4),
    width=st.integers(1, 40),
    columns=st.sampled_from([8, 32]),
    layout=st.sampled_from(["plain", "halves", "every other column", "transposed"]),
    variant=st.sampled_from(["standard", "gelu", "gelu_tanh"]),
)
@settings(deadline=None, max_examples=25)
def test_any_layout(rows, width, columns, layout, variant):
    gate, up = _laid_out(rows, width, layout)
    activation, launch = "silu" if variant == "standard" else variant, kernels.Launch(columns, 4)
    wanted = getattr(reference, variant)(gate, up)
    torch.testing.assert_close(kernels.activated(gate.detach(), up.detach(), activation, launch), wanted)
    dresult = torch.randn_like(wanted)
    found = kernels.gradients(dresult, gate.detach(), up.detach(), activation, launch)
    for mine, theirs in zip(found, torch.autograd.grad(wanted, (gate, up), dresult), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def _laid_out(rows, width, layout):
    shapes = {"plain": (rows, width), "halves": (rows, 2 * width), "every other column": (rows, 2 * width)}
    values = [torch.randn(shapes.get(layout, (width, rows)), device=DEVICE) for _ in range(2)]
    if layout == "halves":
        values = values[0].chunk(2, dim=-1)
    elif layout == "every other column":
        values = [value[:, ::2] for value in values]
    elif layout == "transposed":
        values = [value.T for value in values]
    return [value.detach().requires_grad_() for value in values]


@pytest.mark.parametrize("kernel", [kernels.standard, kernels.gelu, kernels.gelu_tanh])
def test_compiles_without_a_graph_break(kernel):
    gate, up = _laid_out(5, 24, "halves")
    wanted, found = kernel(gate, up), torch.compile(kernel, backend="aot_eager", fullgraph=True)(gate, up)
    dresult = torch.randn_like(wanted)
    assert torch.equal(found, wanted)
    for mine, theirs in zip(
        torch.autograd.grad(found, (gate, up), dresult), torch.autograd.grad(wanted, (gate, up), dresult), strict=True
    ):
        assert torch.equal(mine, theirs)


def test_different_shapes_are_refused():
    with pytest.raises(ValueError, match=r"gate is torch.float32 of \(2, 4\) and up is torch.float32 of \(2, 3\)"):
        kernels.standard(torch.randn(2, 4), torch.randn(2, 3))
