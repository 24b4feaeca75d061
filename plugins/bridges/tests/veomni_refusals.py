"""What VeOmni does with names that it can't bind, for the page's list: ``ASKED: OUTCOME`` on a line for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

from veomni.arguments.arguments_types import OpsImplementationConfig
from veomni.models.auto import _bind_veomni_ops
from veomni.models.transformers.qwen3_5.generated import patched_modeling_qwen3_5_gpu as without_rotary_slot
from veomni.models.transformers.qwen3_moe.generated import patched_modeling_qwen3_moe_gpu as qwen3_moe
from veomni.ops import apply_ops_config
from veomni.ops.kernel_registry import KERNEL_REGISTRY

from veomni_bridges.veomni_registry import kernel_specs

# Each field whose default needs a GPU.
FIELDS = ("moe", "cross_entropy_loss", "rms_norm", "swiglu_mlp", "rotary_pos_emb", "load_balancing_loss")
LINEAR_ATTENTION = ("rms_norm_gated", "causal_conv1d", "chunk_gated_delta_rule")
EAGER = {f"{field}_implementation": "eager" for field in (*FIELDS, *LINEAR_ATTENTION)}


def config(op: str, name: str) -> Any:
    return OpsImplementationConfig(**{**EAGER, "attn_implementation": "eager", f"{op}_implementation": name})


def report(asked: str, ask: Callable[[], Any]) -> None:
    try:
        ask()
    except Exception as error:
        print(f"{asked}: {type(error).__name__}: {error}")
    else:
        print(f"{asked}: accepted")


def main() -> None:
    specs = kernel_specs()
    for spec in specs:
        KERNEL_REGISTRY.register(spec)
    report("the same name again", lambda: KERNEL_REGISTRY.register(specs[0]))
    report("a causal loss", lambda: apply_ops_config(config("cross_entropy_loss", "veomni_core.chunk_loss")))
    report("no such kernel", lambda: _bind_veomni_ops(qwen3_moe, config("rms_norm", "veomni_core.acme")))
    report("no rotation", lambda: _bind_veomni_ops(qwen3_moe, config("rotary_pos_emb", "veomni_core.torch")))
    report("another device", lambda: _bind_veomni_ops(qwen3_moe, config("rms_norm", "veomni_core.npu")))
    report("no slot", lambda: _bind_veomni_ops(without_rotary_slot, config("rotary_pos_emb", "veomni_core.acme")))
    # The experts' name as an entry of the registry, to reach what VeOmni does after the slot has its kernel.
    key = ("moe_experts", "standard")
    stand_in = mock.Mock(factory=lambda: print)
    with mock.patch.dict(KERNEL_REGISTRY._specs, {key: {"veomni_core.acme": stand_in}}):
        report("experts", lambda: _bind_veomni_ops(qwen3_moe, config("moe", "veomni_core.acme")))
    with mock.patch("veomni.utils.import_utils.is_torch_npu_available", return_value=True):
        for op in ("rms_norm", "rotary_pos_emb", "swiglu_mlp", "load_balancing_loss"):
            report(f"{op} on an NPU", lambda op=op: config(op, "veomni_core.npu"))  # type: ignore[misc]


if __name__ == "__main__":
    main()
