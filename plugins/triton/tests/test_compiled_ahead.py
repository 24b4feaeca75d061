"""Every launch of a model's layer compiles, and fits, on GPUs that are not here: NVIDIA's with least memory, and AMD's.

SM80 and SM90 have more shared memory than SM89, and compile what it and SM100 do, but for sparse attention, whose tiles
are for SM90's. SM100 has products of its own.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from calls_ahead import assert_compiled
from veomni_core.descriptions.hardware import Hardware
from veomni_triton.plugin import veomni_kernels

SCRIPT = Path(__file__).with_name("compile_ahead.py")
CALLS = [
    ("l40s", "float32", "^(?!sparse)", 7),
    ("l40s", "bfloat16", "^(?!sparse)", 23),
    ("h100", "bfloat16", "sparse|^attention|linear", 6),
    ("b200", "bfloat16", "delta|scan|sparse|^attention|linear", 13),
    ("mi300x", "bfloat16", "", 25),
]


@pytest.mark.thorough
@pytest.mark.parametrize("gpu, dtype, calls, least", CALLS, ids=[f"{gpu}-{dtype}" for gpu, dtype, *_ in CALLS])
def test_every_launch_compiles_and_fits(gpu, dtype, calls, least, tmp_path):
    assert_compiled(SCRIPT, gpu, dtype, calls, least, tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "calls, kernel, least",
    [("delta rule.* in a fixed order", "recurrence_kernel", 2), ("log.* in a fixed order", "sums_kernel", 1)],
    ids=["delta rule", "log-probabilities"],
)
def test_in_a_fixed_order_is_one_binary(calls, kernel, least, tmp_path):
    """For one token, many and packed ones, that begin anywhere: another binary might add up in another order."""
    for row in assert_compiled(SCRIPT, "h100", "bfloat16", calls, least, tmp_path):
        assert [each["name"] for each in row["functions"]].count(kernel) == 1


def test_products_are_refused_where_triton_has_no_matrix_units():
    refused = {spec.op_name for spec in veomni_kernels() if spec.hardware.unmet(Hardware.named("t4"))}
    losses = {"cross_entropy_loss", "token_logprobs"}  # by linear's products
    assert refused - losses == {
        *("attention", "chunk_gated_delta_rule", "dsa_attention", "dsa_indexer", "linear", "mamba2_scan")
    }


def test_an_amd_gpu_must_pass_first():
    amd = Hardware.named("mi300x")
    on_gpus = veomni_kernels()
    assert on_gpus and all(not spec.hardware.unmet(amd) for spec in on_gpus)
    assert {spec.must_pass_first(amd) for spec in on_gpus} == {"it was never run on an AMD GPU"}
    assert not any(spec.must_pass_first(Hardware.named("h100")) for spec in on_gpus)
