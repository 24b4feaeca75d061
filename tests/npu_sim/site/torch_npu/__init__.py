"""What stands in for torch_npu on the simulated device: its version, its operators, and ``torch_npu.npu``."""

from __future__ import annotations

import torch

from npu_sim.operators import SCHEMAS

__version__ = "2.13.0"
npu = torch.npu

for _name in SCHEMAS:
    globals()[_name] = getattr(torch.ops.npu, _name)
