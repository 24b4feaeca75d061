"""Qwen3.5 whose convolution is another library's where that is installed."""

import torch
import torch.nn.functional as F
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated

from veomni_patchgen import PatchConfig
from veomni_patchgen.source import read_source

config = PatchConfig("transformers.models.qwen3_5.modeling_qwen3_5", "patched_modeling_qwen3_5_gpu.py")

CONVOLUTION = """
try:
    from fla.modules.convolution import causal_conv1d as causal_conv1d_fn
except ImportError:
    causal_conv1d_fn = None
"""


def use_another_convolution(config):
    """Put ``causal_conv1d_fn`` in the place of upstream's, which imports it, or from 5.17 on defines it."""
    imported = "causal_conv1d_fn" in read_source(config.source_module).imports
    (config.drop_import_names if imported else config.exclude_from_output)("causal_conv1d_fn")
    config.add_post_import_block(CONVOLUTION)


use_another_convolution(config)


@config.override_method("Qwen3_5RMSNormGated.forward", description="the gate before the norm's weight")
def gated_norm_forward(self, hidden_states, gate=None):
    dtype = hidden_states.dtype
    assert isinstance(self, Qwen3_5RMSNormGated)
    x = hidden_states.float()
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
    x = self.weight * x.to(dtype)
    return (x * F.silu(gate.float())).to(dtype)
