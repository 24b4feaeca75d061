"""Which benchmarks a changed path concerns."""

from __future__ import annotations

import importlib

import pytest

CHANGED = {
    "plugins/torch_native/src/veomni_torch/kda.py": {"kda cpu", "kda cuda"},
    "plugins/triton/src/veomni_triton/rms_norm/launch.py": {"triton_rms_norm cuda"},
    "plugins/triton_moe/src/veomni_triton_moe/moe_experts/launch.py": {"lora cuda", "moe cuda"},
    "plugins/torch_native/src/veomni_torch/rms_norm.py": {"cpu_kernels cpu"},
    "plugins/ops/src/veomni_ops/mamba2_scan.py": {"mamba2_scan cpu", "mamba2_scan cuda", "triton_mamba2_scan cuda"},
    "plugins/ops/src/veomni_ops/attention.py": {"triton_attention cuda"},
    "plugins/triton/src/veomni_triton/dsa_indexer/launch.py": {"triton_dsa cuda"},
    "plugins/ops/src/veomni_ops/token_dispatch.py": set(),
    "plugins/trainer/src/veomni_trainer/train.py": set(),
    "plugins/torch_native/tests/test_kda.py": set(),
    "plugins/torch_native/README.md": set(),
    "benchmarks/kda/kda.py": set(),
    "docs/design/index.md": set(),
}


@pytest.mark.parametrize("path, chosen", CHANGED.items())
def test_a_path_concerns_the_op_that_it_names(revisions, path, chosen):
    assert chosen_for(revisions, path) == chosen


def test_a_shared_source_concerns_all_kernels_of_its_plugin_and_one_of_the_core_all(revisions):
    every = {f"{each.name} {each.device}" for each in revisions("selection").GUARDED}
    assert chosen_for(revisions, "core/src/veomni_core/tables.py") == every
    of_torch = chosen_for(revisions, "plugins/torch_native/src/veomni_torch/delta_chunks.py")
    assert {name for name in every if name.endswith("cpu")} <= of_torch < every
    of_triton = chosen_for(revisions, "plugins/triton/src/veomni_triton/partial_sums.py")
    assert of_triton and all(name.endswith("cuda") for name in of_triton)


def chosen_for(revisions, path):
    selection = revisions("selection")
    ops = [op.name for op in importlib.import_module("veomni_ops.catalog").OPS]
    found = selection.changed([path], selection.GUARDED, ("cpu", "cuda"), ops)
    return {f"{each.name} {each.device}" for each in found}
