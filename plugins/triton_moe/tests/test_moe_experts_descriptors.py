"""Descriptors whose layout was checked before are those that Triton makes."""

from __future__ import annotations

import pytest
import torch
from triton.tools.ragged_tma import create_ragged_descriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from veomni_ops.triton_descriptors import described, described_rows

MAKERS = {"plain": (described, TensorDescriptor.from_tensor), "ragged": (described_rows, create_ragged_descriptor)}


@pytest.mark.parametrize("ours, tritons", MAKERS.values(), ids=MAKERS)
def test_a_descriptor_is_tritons_with_the_tensor_as_its_base(ours, tritons):
    for rows in (32, 48, 32):  # the last is of a layout that is known
        tensor = torch.zeros(rows, 64, dtype=torch.bfloat16)
        found, wanted = vars(ours(tensor, (16, 32))), vars(tritons(tensor, [16, 32]))
        assert found.pop("base").data_ptr() == wanted.pop("base").data_ptr() == tensor.data_ptr()
        assert found == wanted


def test_strides_and_dtypes_have_layouts_of_their_own():
    whole = torch.zeros(3, 32, 64, dtype=torch.float16)
    for tensor in (whole, whole[:, :, :32], whole[:2], whole.view(torch.bfloat16)):
        found, wanted = vars(described(tensor, (1, 16, 32))), vars(TensorDescriptor.from_tensor(tensor, [1, 16, 32]))
        assert {**found, "base": None} == {**wanted, "base": None}


@pytest.mark.parametrize("ours, tritons", MAKERS.values(), ids=MAKERS)
def test_what_triton_refuses_is_refused_each_time(ours, tritons):
    misaligned = torch.zeros(32 * 64 + 1, dtype=torch.bfloat16)[1:].view(32, 64)
    uneven = torch.zeros(32, 68, dtype=torch.bfloat16)[:, :64]
    ours(torch.zeros(32, 64, dtype=torch.bfloat16), (16, 32))  # the layout of the first is known
    for tensor in (misaligned, uneven) * 2:
        with pytest.raises(AssertionError):
            tritons(tensor, [16, 32])
        with pytest.raises(AssertionError):
            ours(tensor, (16, 32))
