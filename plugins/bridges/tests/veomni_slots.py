"""Compares what VeOmni's modeling code computes without a kernel with the reference that each slot is mapped to.

Prints the slots. An assertion names one that differs in values or gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3MoeConfig
from veomni.models.transformers.deepseek_v4.generated import patched_modeling_deepseek_v4_gpu as deepseek_v4
from veomni.models.transformers.qwen3_5.generated import patched_modeling_qwen3_5_gpu as qwen3_5
from veomni.models.transformers.qwen3_moe.generated import patched_modeling_qwen3_moe_gpu as qwen3_moe
from veomni.ops.kernel_registry import KERNEL_REGISTRY

from veomni_bridges.veomni_registry import _SLOTS, kernel_specs
from veomni_ops.catalog import OPS
from veomni_ops.contract import contract_for

Call = Callable[..., Any]


def cases(dtype: torch.dtype) -> dict[tuple[str, str], tuple[Call, Call, list[Tensor]]]:
    """For each slot: what the model computes, the call that it makes of a kernel, and the tensors of both."""

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype).requires_grad_()

    def angles(width: int) -> list[Tensor]:
        each = torch.randn(2, 5, width // 2).repeat(1, 1, 2)
        return [each.cos().to(dtype), each.sin().to(dtype)]

    norm, offset = qwen3_moe.Qwen3MoeRMSNorm(17).to(dtype), qwen3_5.Qwen3_5RMSNorm(17).to(dtype)
    for each in (norm, offset):
        torch.nn.init.normal_(each.weight, mean=0.5)
    unweighted = deepseek_v4.DeepseekV4UnweightedRMSNorm(1e-6)
    mlp = qwen3_moe.Qwen3MoeMLP(Qwen3MoeConfig(hidden_size=17, intermediate_size=11), intermediate_size=11).to(dtype)
    heads = [drawn(2, 3, 5, 8), drawn(2, 1, 5, 8)]
    gates = [drawn(10, 4), drawn(10, 4)]
    mask = torch.ones(2, 5, dtype=torch.long)
    mask[0, 3:] = 0
    return {
        ("rms_norm", "standard"): (norm, lambda k: lambda x: k(x, norm.weight, norm.variance_epsilon), [drawn(3, 17)]),
        ("rms_norm", "qwen3_5"): (offset, lambda k: lambda x: k(x, offset.weight, offset.eps), [drawn(3, 17)]),
        ("rms_norm", "unweighted"): (unweighted, lambda k: lambda x: k(x, None, 1e-6), [drawn(3, 17)]),
        ("swiglu_mlp", "standard"): (mlp, lambda k: lambda x: k(mlp, x), [drawn(3, 17)]),
        ("rotary_pos_emb", "full"): (
            lambda q, k, cos, sin: qwen3_moe.apply_rotary_pos_emb(q, k, cos, sin),
            lambda kernel: lambda *tensors: kernel(*tensors, position_ids=None, unsqueeze_dim=1),
            [*heads, *angles(8)],
        ),
        ("rotary_pos_emb", "partial"): (
            lambda q, k, cos, sin: qwen3_5.apply_rotary_pos_emb(q, k, cos, sin),
            lambda kernel: lambda *tensors: kernel(*tensors, unsqueeze_dim=1),
            [*heads, *angles(4)],
        ),
        ("load_balancing_loss", "standard"): (
            lambda *logits: qwen3_moe.load_balancing_loss_func(logits, 4, 2, mask),
            lambda kernel: lambda *logits: kernel(logits, 4, 2, mask),
            gates,
        ),
    }


def outcome(function: Call, tensors: list[Tensor]) -> list[Tensor]:
    """The results, and the gradients of the tensors that have one."""
    result = function(*tensors)
    results: Sequence[Tensor] = result if isinstance(result, tuple) else [result]
    upstream = [torch.linspace(-1, 1, each.numel(), dtype=each.dtype).view_as(each) for each in results]
    leaves = [each for each in tensors if each.requires_grad]
    return [*results, *torch.autograd.grad(results, leaves, upstream)]


def main() -> None:
    before = {key: dict(held) for key, held in KERNEL_REGISTRY._specs.items()}
    for spec in kernel_specs():
        assert spec.name.startswith("veomni_core.") and (spec.op_name, spec.variant) in before
        KERNEL_REGISTRY.register(spec)
    for key, held in before.items():
        assert {name: KERNEL_REGISTRY._specs[key][name] for name in held} == held
    ops = {op.name: op for op in OPS}
    assert cases(torch.float32).keys() == _SLOTS.keys()
    # In bfloat16 VeOmni's balancing loss rounds at other places than transformers', whose value the contract has.
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        torch.manual_seed(0)
        for (op, variant), (own, calling, tensors) in cases(dtype).items():
            slot = _SLOTS[op, variant]
            reference = slot.adapt(contract_for(ops[op], slot.variant).reference)
            for mine, theirs in zip(outcome(calling(reference), tensors), outcome(own, tensors), strict=True):
                close = torch.allclose(mine, theirs, rtol=tolerance, atol=tolerance)
                assert mine.dtype == theirs.dtype and close, f"{op}/{variant} in {dtype}: {mine} instead of {theirs}"
            print(op, variant)


if __name__ == "__main__":
    main()
