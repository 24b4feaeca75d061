"""``veomni explain``: why a kernel can't run, what installing one would add, and what ``auto`` takes."""

from __future__ import annotations

import json

import pytest


@pytest.mark.thorough
def test_explain_says_why_not_and_what_would_win(veomni, install, install_absent):
    install(
        "gpu-plugin",
        """
        from veomni_core import HardwareRequirement, KernelSpec, OpSpec, hookimpl
        VEOMNI_PLUGIN_API_VERSION = 1
        @hookimpl
        def veomni_ops():
            return [OpSpec("acme_op", ("standard",), "acme_op_implementation", contract="m:c")]
        @hookimpl
        def veomni_kernels():
            need = HardwareRequirement("cuda", min_compute_capability=90, packages=("nowhere>=1",))
            return [KernelSpec("fast", "acme_op", "standard", "m:f", hardware=need, preference=99)]
        """,
    )
    assert "needs compute capability" in veomni("explain", "acme_op", "--hardware", "a100")
    text = veomni("explain", "acme_op", "--hardware", "a100", "--json")
    assert "needs compute capability >= 9.0, this GPU is 8.0 (NVIDIA A100)" in text
    data = json.loads(veomni("explain", "acme_op_implementation", "--hardware", "h200", "--json"))
    (fast,) = [kernel for kernel in data["kernels"] if kernel["kernel"] == "fast"]
    assert fast["runs"] and fast["assumes"] == ["nowhere>=1"] and data["auto"]["standard"] == "fast"
    install_absent("far-plugin")
    data = json.loads(veomni("explain", "far_op", "--json"))
    assert data["not_here"] == {"far": "far is not installed: pip install veomni-far"}


def test_a_kernel_without_a_backward_is_not_what_auto_takes(veomni, install):
    install(
        "inference-plugin",
        """
        from veomni_core import KernelSpec, OpSpec, hookimpl
        VEOMNI_PLUGIN_API_VERSION = 1
        @hookimpl
        def veomni_ops():
            return [OpSpec("acme_op", ("standard",), "acme_op_implementation", contract="m:c")]
        @hookimpl
        def veomni_kernels():
            slow = KernelSpec("slow", "acme_op", "standard", "m:f", preference=98)
            return [slow, KernelSpec("fast", "acme_op", "standard", "m:f", backward=False, preference=99)]
        """,
    )
    data = json.loads(veomni("explain", "acme_op", "--hardware", "h200", "--json"))
    (fast,) = [kernel for kernel in data["kernels"] if kernel["kernel"] == "fast"]
    assert not fast["runs"] and data["auto"]["standard"] == "slow"
    text = veomni("explain", "acme_op", "--hardware", "h200")
    assert "auto takes slow for standard: the only one usable here" in text
