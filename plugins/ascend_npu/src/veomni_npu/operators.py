"""torch_npu's operators, ``torch.ops.npu``. Empty where torch_npu is not installed, so that kernels can be imported."""

from __future__ import annotations

from typing import Any

import torch

from veomni_npu.torch_npu_loading import load_torch_npu

load_torch_npu()
npu: Any = torch.ops.npu
