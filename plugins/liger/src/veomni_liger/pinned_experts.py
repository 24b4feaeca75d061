"""Liger's experts with one fixed configuration per kernel, in a private copy of Liger's module.

Liger autotunes each kernel over 16 to 40 configurations at the first call of a shape, unless
``LIGER_FUSED_MOE_AUTOTUNE=0`` was set before the library was imported. What a planned kernel does must depend on
neither. So the module that launches the kernels is executed a second time, without an entry in ``sys.modules``, and the
kernels are replaced in that copy. Other code that imports ``liger_kernel`` gets the original, with autotuning.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from functools import partial
from typing import Any

from veomni_liger.loading import part

Configuration = Mapping[str, int]
# Found by Liger's own autotuning on an H200 for Qwen3-30B-A3B, T = 16384, in a run of
# `benchmarks/plugins/liger_adapters.py --search`.
CONFIGURATIONS: Mapping[str, Configuration] = {
    "_fused_up_proj_swiglu_kernel": {"BLOCK_N": 64, "BLOCK_K": 64, "num_warps": 4, "num_stages": 2},
    "_fused_down_proj_kernel": {"BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 4, "num_stages": 3},
    "_token_gather_weighted_sum_kernel": {"BLOCK_H": 512, "BLOCK_K": 1, "num_warps": 4, "num_stages": 4},
    "_moe_bwd_down_proj_kernel": {"BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 5},
    "_moe_bwd_dX_expanded_kernel": {"BLOCK_N": 128, "BLOCK_K": 32, "num_warps": 4, "num_stages": 4},
    "_moe_bwd_dW1_kernel": {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 32, "num_warps": 4, "num_stages": 2},
    "_moe_bwd_dW2_kernel": {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 32, "num_warps": 4, "num_stages": 2},
}


class _Pinned:
    """Launches an autotuned kernel's underlying kernel with one configuration."""

    def __init__(self, autotuner: Any, configuration: Configuration) -> None:
        self._kernel, self._configuration = autotuner.fn, configuration

    def __getitem__(self, grid: Any) -> Any:
        return partial(self._kernel[grid], **self._configuration)


def pinned_experts(configurations: Mapping[str, Configuration] = CONFIGURATIONS) -> Any:
    """``LigerFusedMoEFunction`` from a copy of its module, whose kernels are launched with ``configurations``.

    Raises:
        ImportError: the library can't be imported, or its autotuned kernels are not the ones in ``configurations``.
    """
    part("fused_moe", "LigerFusedMoEFunction")  # raises with instructions if it can't be imported
    spec = importlib.util.find_spec("liger_kernel.ops.fused_moe")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    searching = {name for name, value in vars(module).items() if hasattr(value, "configs")}
    if searching != configurations.keys():
        different = ", ".join(sorted(searching ^ configurations.keys()))
        raise ImportError(
            f"liger-kernel autotunes other kernels than veomni-liger pins; the two differ in: {different}"
        )
    for name, configuration in configurations.items():
        setattr(module, name, _Pinned(getattr(module, name), configuration))
    return module.LigerFusedMoEFunction
