"""The experts' kernels against their contracts.

Without a GPU they run in Triton's interpreter, in float32: its bf16 products are not products.
"""

from __future__ import annotations

import pytest
import torch

from veomni_conformance import check_kernel
from veomni_core.kernels import is_aligned
from veomni_ops.contract import Size
from veomni_triton_moe.moe_experts import layer
from veomni_triton_moe.plugin import veomni_kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SPECS = [spec for spec in veomni_kernels() if spec.op_name == "moe_experts"]
# Triton's interpreter runs one element after the other.
SAMPLES = {} if DEVICE == "cuda" else {"largest": Size.SMALL, "every_form": False}


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_conformance(spec):
    check_kernel(spec, DEVICE, "float32", **SAMPLES).raise_if_failed()


@pytest.mark.thorough
@pytest.mark.skipif(DEVICE == "cuda", reason="on a GPU, 16-bit operands take this path of themselves")
@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec.preference > 0], ids=str)
def test_conformance_by_descriptors(spec, monkeypatch):
    monkeypatch.setattr(layer, "can_be_described", is_aligned)
    check_kernel(spec, DEVICE, "float32", **SAMPLES).raise_if_failed()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_conformance_in_16_bits(spec, dtype):
    check_kernel(spec, DEVICE, dtype, **SAMPLES).raise_if_failed()


@pytest.mark.gpu
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_conformance_by_pointers_in_16_bits(spec, monkeypatch):
    monkeypatch.setattr(layer, "can_be_described", lambda tensor: False)
    check_kernel(spec, DEVICE, "bfloat16", **SAMPLES).raise_if_failed()
