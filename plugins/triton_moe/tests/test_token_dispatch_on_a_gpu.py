"""alltoall_dedup on a GPU: with a bound the host waits for nothing, and without one once, for the counts."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.gpu

RUN = """
import sys
import torch
from torch import distributed as dist
from veomni_ops.expert_ranks import ExpertRanks
from veomni_triton_moe.token_dispatch import alltoall_dedup

torch.cuda.set_device(0)
dist.init_process_group("nccl", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
ranks = ExpertRanks(dist.group.WORLD, 1, 0, 4)
hidden = torch.randn(37, 64, device="cuda", requires_grad=True)
weights = torch.rand(37, 2, device="cuda", requires_grad=True)
index = torch.randint(4, (37, 2), device="cuda")

def experts(rows, index, weights):
    return rows * weights.sum(dim=1, keepdim=True)

def step(kernel):
    kernel(hidden, index, weights, experts, ranks).sum().backward()

for max_tokens in (0, 40):
    kernel = alltoall_dedup(max_tokens)
    step(kernel)  # compiles the kernels, and makes the communicator
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(kernel)
        print(max_tokens, "never waited")
    except RuntimeError as error:
        print(max_tokens, "waited" if "synchroniz" in str(error) else error)
    finally:
        torch.cuda.set_sync_debug_mode("default")
"""


def test_with_a_bound_the_host_waits_for_nothing(tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU; torch sees none here")
    command = [sys.executable, "-c", RUN, str(tmp_path / "store")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.stdout.splitlines() == ["0 waited", "40 never waited"], result.stdout + result.stderr[-3000:]
