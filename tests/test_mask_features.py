"""An attention kernel's spec declares the masks that the kernel itself says it takes."""

from __future__ import annotations

import pytest

from veomni_core.errors import KernelLoadError
from veomni_core.ops.attention import MASK_FEATURES
from veomni_core.sites.interface_names import MASK_INTERFACE
from veomni_flash_attn import plugin as flash_attn
from veomni_npu import plugin as npu
from veomni_torch import plugin as torch_native

SPECS = [
    spec
    for plugin in (flash_attn, npu, torch_native)
    for spec in plugin.veomni_kernels()
    if spec.op_name == "attention"
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_one_feature_and_the_right_one(spec):
    (declared,) = set(spec.features) & set(MASK_FEATURES.values())
    try:
        kernel = spec.load()
    except KernelLoadError as error:
        pytest.skip(f"its library is not installed: {error}")
    interface = getattr(kernel, MASK_INTERFACE, "sdpa")
    assert declared == MASK_FEATURES["flash_attention" if "flash" in interface else interface]
