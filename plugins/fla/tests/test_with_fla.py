"""fla-core itself, beside this environment: its kernels in Triton's interpreter, and what its switches change.

It is not installed in the environment of the tests: transformers calls an installed fla in every hybrid model, and on a
CPU each of them would fail.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from installed_beside import environment_with, installed_beside

TESTS = Path(__file__).parent
FLA = ("fla-core==0.6.0", "einops==0.8.2")
SWITCHES = {
    "FLA_TILELANG": "1",
    "FLA_FLASH_QLA": "1",
    "FLA_FLASH_KDA": "1",
    "FLA_GLUON": "1",
    "FLA_INTRACARD_CP": "1",
    "FLA_CONV_BACKEND": "cuda",
}
without_a_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the kernels themselves")


def printed(script, *arguments, **variables):
    """The JSON that a script prints in an environment with fla-core."""
    folder = installed_beside(*FLA, dependencies=False)
    result = subprocess.run(
        [sys.executable, str(TESTS / script), *arguments],
        capture_output=True,
        text=True,
        env=environment_with(folder, TESTS.parents[2] / "tests", **variables),
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


@without_a_gpu
@pytest.mark.thorough
@pytest.mark.parametrize(
    "kernel",
    [
        "rms_norm_gated/sigmoid:fla-float16",
        "causal_conv1d/standard:fla-float32",
        "chunk_gated_delta_rule/standard:fla-float16",
        "kda/standard:fla-float16",
    ],
)
def test_the_kernels_of_fla_keep_the_contract_in_the_interpreter(kernel):
    found = printed("in_the_interpreter.py", kernel, TRITON_INTERPRET="1")[kernel]
    assert found["failures"] == [] and found["cases"] > 5


@without_a_gpu
@pytest.mark.thorough
def test_kda_s_kernels_get_gradients_of_states_and_keys_of_a_final_state_in_float32():
    half, single = "torch.float16", "torch.float32"
    assert printed("dtype_of_states.py", TRITON_INTERPRET="1") == {
        "backward": {"h": half, "dh": single},
        "a final state": {"k": single, "v": half},
        "none": {"k": half, "v": half},
    }


@without_a_gpu
@pytest.mark.thorough
def test_what_runs_is_the_same_whatever_the_environment_and_its_backends_say():
    found = printed("environments.py", **SWITCHES)
    assert found["theirs"] == "Taken"  # fla itself takes the backend
    assert found["ours"] not in ("Taken", "nothing")  # ours calls the Triton kernel, which needs a GPU
    assert found["dispatchers"] == [] and found["functions"] > 20 and found["own dispatchers"] > 5
    assert found["changed"] == [] and found["process"] == []
