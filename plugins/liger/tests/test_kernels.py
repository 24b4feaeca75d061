"""Every kernel against its contract, in the interpreter and on a GPU."""

from __future__ import annotations

import pytest
import torch

from veomni_conformance import check_kernel
from veomni_liger.plugin import veomni_kernels
from veomni_ops.contract import Size

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SPECS = veomni_kernels()
in_the_interpreter = pytest.mark.skipif(DEVICE == "cuda", reason="a GPU runs the kernels themselves")


@in_the_interpreter
@pytest.mark.parametrize(
    "spec", [pytest.param(s, id=str(s), marks=[pytest.mark.thorough] * (s.name == "fused_liger")) for s in SPECS]
)
def test_conformance(spec):
    dtype = "float32" if "float32" in spec.dtypes else "bfloat16"
    check_kernel(spec, "cpu", dtype, largest=Size.SMALL, every_form=False).raise_if_failed()


@in_the_interpreter
@pytest.mark.parametrize("spec", [s for s in SPECS if s.variant in ("cast_after", "offset", "unweighted")], ids=str)
def test_norms_that_round_once_conform_in_bf16(spec):
    check_kernel(spec, "cpu", "bfloat16", largest=Size.SMALL, every_form=False).raise_if_failed()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "spec, dtype", [pytest.param(spec, dtype, id=f"{spec}-{dtype}") for spec in SPECS for dtype in spec.dtypes]
)
def test_conformance_on_a_gpu(spec, dtype):
    check_kernel(spec, "cuda", dtype).raise_if_failed()
