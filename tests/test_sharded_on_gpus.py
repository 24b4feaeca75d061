"""Real kernels on models that transformers' engine shards over two GPUs, over NCCL: the numbers of the unbound engine.

One launch of two processes runs every case and prints a line for each.
plugins/transformers/tests/test_sharded_models.py does more of this on CPUs, over gloo, with the ops' references as
kernels.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from sharded_on_gpus import DTYPES, cases

pytest.importorskip(
    "transformers.distributed.expert_parallel", reason="transformers has a distributed engine since 5.21"
)
pytestmark = [pytest.mark.gpu, pytest.mark.thorough]

SCRIPT = Path(__file__).with_name("sharded_on_gpus.py")
CASES = list(cases(("fused_triton", "fused_quack")))
FLOAT32 = 1e-5
# In bf16 a route may flip for either; so a bound model may be as far from float64 as a few times the unbound one is.
TIMES, BFLOAT16 = 3, 3e-2


@cache
def reported() -> tuple[dict[str, dict], str]:
    """What was found for each case, and the end of what the launch printed."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    with TemporaryDirectory() as folder:
        try:
            result = subprocess.run(
                [*launch, str(SCRIPT), folder], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=400
            )
            output = result.stdout
        except subprocess.TimeoutExpired as error:
            output = f"not through after {error.timeout} s: {error.stdout!r}"
        file = Path(folder) / "cases"
        lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    print(output)
    return {line["case"]: line for line in lines}, output[-4000:]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_bound_model_gives_the_numbers_of_the_unbound_engine(case):
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs; {torch.cuda.device_count()} here")
    cases_found, output = reported()
    assert str(case) in cases_found, output
    found = cases_found[str(case)]
    if "skipped" in found:
        pytest.skip(found["skipped"])
    assert "failed" not in found, f"{found['failed']}\n{output}"
    if DTYPES[case.kernel] == "float32":
        assert found["bound to unbound"] < FLOAT32, found
        assert found["losses of 20 steps, bound to unbound"] < FLOAT32, found
    else:
        assert found["bound to exact"] < max(TIMES * found["unbound to exact"], BFLOAT16), found
        assert found["losses of 20 steps, bound to unbound"] < BFLOAT16, found
    wanted = {"moe_experts"} if case.family != "llama" else {"rms_norm"}
    assert wanted <= set(found["kernels"]), found
