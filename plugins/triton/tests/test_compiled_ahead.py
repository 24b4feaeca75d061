"""Every launch of a model's layer compiles, and fits, on GPUs that are not here: NVIDIA's with least memory, and AMD's.

SM80 and SM90 have more shared memory than SM89, and compile what it and SM100 do. SM100 has products of its own, and
SM120 a copy engine without the memory for its tiles.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from veomni_core.descriptions.hardware import Hardware
from veomni_triton.plugin import veomni_kernels

SCRIPT = Path(__file__).with_name("compile_ahead.py")
CALLS = [
    ("l40s", "float32", ""),
    ("l40s", "bfloat16", ""),
    ("b200", "bfloat16", "experts|delta"),
    ("rtx5090", "bfloat16", "experts"),
    ("mi300x", "bfloat16", ""),
]


@pytest.mark.thorough
@pytest.mark.parametrize("gpu, dtype, calls", CALLS, ids=[f"{gpu}-{dtype}" for gpu, dtype, _ in CALLS])
def test_every_launch_compiles_and_fits(gpu, dtype, calls, tmp_path):
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, SCRIPT, dtype, gpu, calls], capture_output=True, text=True, env=environment, check=False
    )
    assert run.returncode == 0, run.stderr
    rows = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(rows) >= 4 and all(row["functions"] for row in rows)
    assert not {row["call"]: row["problem"] for row in rows if row["problem"]}
    lacking = [(row["call"], each["name"], each["problem"]) for row in rows for each in row["functions"]]
    assert not [each for each in lacking if each[2]]


def test_products_are_refused_where_triton_has_no_matrix_units():
    refused = {spec.op_name for spec in veomni_kernels() if spec.hardware.unmet(Hardware.named("t4"))}
    assert refused == {"moe_experts", "chunk_gated_delta_rule"}


def test_an_amd_gpu_must_pass_first():
    amd = Hardware.named("mi300x")
    on_gpus = [spec for spec in veomni_kernels() if spec.op_name != "token_dispatch"]
    assert on_gpus and all(not spec.hardware.unmet(amd) for spec in on_gpus)
    assert {spec.must_pass_first(amd) for spec in on_gpus} == {"it was never run on an AMD GPU"}
    assert not any(spec.must_pass_first(Hardware.named("h100")) for spec in on_gpus)
