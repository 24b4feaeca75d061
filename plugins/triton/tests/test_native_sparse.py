"""Native sparse attention's kernel against its contract, and its choice and its parts of gradients by themselves."""

from __future__ import annotations

import pytest
import torch

from veomni_conformance import check_kernel
from veomni_ops.contract import Size
from veomni_triton.plugin import veomni_kernels

SPEC = next(spec for spec in veomni_kernels() if spec.name == "native-sparse")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter runs one element after the other.
SAMPLES = {} if DEVICE == "cuda" else {"largest": Size.SMALL, "every_form": False}


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", SPEC.dtypes)
def test_conformance(dtype):
    check_kernel(SPEC, DEVICE, dtype, **SAMPLES).raise_if_failed()
