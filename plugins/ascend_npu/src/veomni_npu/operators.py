"""torch_npu's operators, ``torch.ops.npu``. Empty without torch_npu, so that the kernels can be imported anyway."""

from __future__ import annotations

from typing import Any

import torch

from veomni_npu.torch_npu_loading import load_torch_npu

load_torch_npu()
npu: Any = torch.ops.npu
