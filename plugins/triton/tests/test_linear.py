"""linear against its contract. Without a GPU it runs in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from veomni_conformance import check_kernel
from veomni_ops.contract import Size
from veomni_triton.plugin import veomni_kernels

[SPEC] = [spec for spec in veomni_kernels() if spec.op_name == "linear"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SAMPLES = {} if DEVICE == "cuda" else {"largest": Size.SMALL, "every_form": False}


@pytest.mark.parametrize("dtype", SPEC.dtypes)
def test_conformance(dtype):
    check_kernel(SPEC, DEVICE, dtype, **SAMPLES).raise_if_failed()
