"""The plugin's specs, a registry of them alone, and queries, keys and values for them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from veomni_conformance.given_kernels import definitions
from veomni_core import HardwareRequirement
from veomni_core.discovery.registry import PluginRecord, build_registry
from veomni_flash_attn.plugin import veomni_kernels

NAMES = ("flash_attention_2", "flash_attention_3", "flash_attention_4")
SPECS = {spec.name: spec for spec in veomni_kernels()}
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the libraries themselves are tested on a GPU")


def registry(anywhere: bool = False, conflicts=()):
    kernels = tuple(replace(spec, hardware=HardwareRequirement()) if anywhere else spec for spec in SPECS.values())
    ours = PluginRecord("flash", "veomni-flash-attn", "0", "veomni_flash_attn.plugin", kernels=kernels)
    return build_registry([*definitions(), ours], dict(conflicts))


def heads(batch=1, length=12, q_heads=4, k_heads=2, width=16, dtype=torch.bfloat16):
    torch.manual_seed(0)
    shapes = ((batch, count, length, width) for count in (q_heads, k_heads, k_heads))
    return [torch.randn(*shape).to(dtype).requires_grad_() for shape in shapes]
