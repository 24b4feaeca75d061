"""The kernels for mixture-of-experts MLPs that are measured beside each other, under the contract's call."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

Kernel = Callable[..., Tensor]


def contenders() -> Iterator[tuple[str, Kernel]]:
    """Every kernel that can be imported here, by name; what can't is said."""
    from veomni_torch.moe_experts import standard as grouped
    from veomni_triton_moe.moe_experts import standard, standard_accumulating, standard_recomputing

    yield "veomni fused_triton", standard
    yield "veomni fused_triton, recomputing", standard_recomputing
    yield "veomni fused_triton, accumulating", standard_accumulating
    yield "veomni grouped_mm", grouped
    for name, make in (
        ("veomni fused_quack", _fused_quack),
        ("transformers eager", _transformers_eager),
        ("transformers grouped_mm", _transformers_grouped_mm),
        ("transformers grouped_mm, compiled", lambda: torch.compile(_transformers_grouped_mm(), dynamic=False)),
        ("Liger fused MoE", _liger),
        ("SonicMoE", _sonic),
    ):
        try:
            yield name, make()
        except ImportError as error:
            print(f"{name} is left out: {error}")


def _fused_quack() -> Kernel:
    from veomni_quack.moe_experts.kernel import standard

    return standard


class _Experts:
    """What transformers' experts functions read of a module."""

    has_bias, is_transposed, has_gate, is_concatenated, config = False, False, True, True, None

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        self.num_experts, self.gate_up_proj, self.down_proj = len(gate_up), gate_up, down

    @staticmethod
    def act_fn(gate: Tensor) -> Tensor:
        return torch.nn.functional.silu(gate)

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate) * up


def _transformers_eager() -> Kernel:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    eager = Qwen3MoeExperts.forward
    eager = getattr(eager, "__wrapped__", eager)
    return lambda hidden, index, weights, gate_up, down: eager(_Experts(gate_up, down), hidden, index, weights)


def _transformers_grouped_mm() -> Kernel:
    from transformers.integrations.moe import grouped_mm_experts_forward as grouped

    return lambda hidden, index, weights, gate_up, down: grouped(_Experts(gate_up, down), hidden, index, weights)


def _liger() -> Kernel:
    from liger_kernel.ops import LigerFusedMoEFunction

    return lambda hidden, index, weights, gate_up, down: LigerFusedMoEFunction.apply(
        hidden, gate_up, down, index.to(torch.int32), weights
    )


def _sonic() -> Kernel:
    import quack.autotuner
    from sonicmoe.enums import ActivationType
    from sonicmoe.functional import moe_general_routing_inputs

    # Its search takes minutes per shape, so it runs with its default configurations.
    quack.autotuner.Autotuner.__call__ = lambda self, *args, **kwargs: self.fn(*args, **{**kwargs, "config": None})

    def sonic(hidden: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        tokens, k = index.shape
        token = torch.arange(tokens, device=hidden.device, dtype=torch.int32).repeat_interleave(k)
        stream = torch.cuda.current_stream().cuda_stream
        routes = (weights.float().reshape(-1), token, index.reshape(-1).to(torch.int32))
        experts = (gate_up.permute(1, 2, 0), None, down.permute(1, 2, 0), None, len(down))
        found = moe_general_routing_inputs(hidden, *routes, *experts, stream, ActivationType.SWIGLU, False, True)
        return found[0] if isinstance(found, tuple) else found

    return sonic
