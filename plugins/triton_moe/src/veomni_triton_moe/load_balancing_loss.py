"""load_balancing_loss in three launches, whatever the number of layers: sums over the logits, the loss, the gradient.

With ``r`` the share of routes per expert and ``p`` the mean probability the loss is ``E · Σ r_e · p_e``, so the
gradient of a token's probabilities is the same vector, ``slope = E · r / tokens``, for every token that counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from veomni_core.kernels import first_derivatives_only
from veomni_ops.router_softmax import as_softmax_takes
from veomni_ops.sizes import ceil_div, power_of_two
from veomni_ops.torch_operators import operator
from veomni_ops.triton_gpus import multiprocessors, register_limit
from veomni_triton_moe.limits import MAX_EXPERTS
from veomni_triton_moe.load_balancing_kernels import gradients_kernel, loss_kernel, sums_kernel


def standard(
    gate_logits: tuple[Tensor, ...] | None, num_experts: int, top_k: int = 2, attention_mask: Tensor | None = None
) -> Tensor | int:
    """The auxiliary loss over all layers' router logits, in float32.

    Probabilities are rounded to the logits' dtype, unless autocast runs softmax in float32; among equal ones the
    lowest expert is chosen. The gradient has the logits' dtype, and is computed only for layers that need it.

    Args:
        gate_logits: One ``[T, E]`` per layer, of one dtype.
        num_experts: ``E``.
        top_k: Choices per token, ``K``.
        attention_mask: ``[B, S]`` with ``T = B * S``, the weight of each token; 0 leaves it out.

    Returns:
        A scalar tensor, or, as in transformers, the number 0 if ``gate_logits`` is not a tuple or is empty.

    Raises:
        ValueError: the layers differ in shape or dtype, or another argument does not fit them.
    """
    if not isinstance(gate_logits, tuple) or not gate_logits:
        return 0
    shape, dtype = gate_logits[0].shape, gate_logits[0].dtype
    if any(logits.shape != shape or logits.dtype != dtype for logits in gate_logits):
        raise ValueError("gate_logits: every layer must have the same shape and dtype")
    if not 1 <= top_k <= num_experts == shape[1] <= MAX_EXPERTS:
        raise ValueError(
            f"gate_logits of shape {tuple(shape)} with num_experts={num_experts} and top_k={top_k}: "
            f"expected [T, num_experts] and 1 <= top_k <= num_experts <= {MAX_EXPERTS}"
        )
    if attention_mask is not None and attention_mask.numel() != shape[0]:
        raise ValueError(
            f"attention_mask has {attention_mask.numel()} elements, expected one for each of {shape[0]} tokens"
        )
    # All layers have one dtype, so PyTorch is asked of the first alone: a model has dozens.
    if as_softmax_takes(gate_logits[0]) is not gate_logits[0]:
        gate_logits = tuple(map(as_softmax_takes, gate_logits))
    return _LoadBalancing.apply(top_k, attention_mask, *gate_logits)


class _LoadBalancing(Function):
    @staticmethod
    def forward(ctx: Any, top_k: int, mask: Tensor | None, *gate_logits: Tensor) -> Tensor:
        loss, slope = _forward(gate_logits, top_k, mask)
        ctx.save_for_backward(slope, mask, *gate_logits)
        return loss

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        slope, mask, *gate_logits = ctx.saved_tensors
        needed = ctx.needs_input_grad[2:]
        layers = [logits for logits, wanted in zip(gate_logits, needed, strict=True) if wanted]
        gradients = iter(_backward(dloss, slope, layers, mask).unbind())
        return None, None, *(next(gradients) if wanted else None for wanted in needed)


@dataclass(frozen=True)
class Launch:
    """A launch configuration.

    Attributes:
        tokens: Tokens of a tile.
        programs: Programs per layer.
        num_warps: Warps per program.
        stages: Depth of the software pipeline over tiles.
        registers: The most registers per thread; ``None`` leaves them to the compiler.
    """

    tokens: int
    programs: int
    num_warps: int = 4
    stages: int = 1
    registers: int | None = None


def sums_launch(gate_logits: Sequence[Tensor], programs_per_processor: int = 4, num_warps: int = 4) -> Launch:
    """Few programs with many tiles each, since :func:`loss_kernel` has to add up the sums that each one leaves.

    With 128 registers a thread, four of them fit a multiprocessor: the best that
    `benchmarks/load_balancing_loss/triton_load_balancing_loss.py --tune` found on an H200.
    """
    logits = gate_logits[0]
    tokens = _tokens_per_tile(logits, num_warps)
    # Divided over the layers, which one launch handles together.
    programs = programs_per_processor * multiprocessors(logits.device) // len(gate_logits)
    return Launch(tokens, max(1, min(programs, ceil_div(len(logits), tokens))), num_warps, registers=128)


def gradients_launch(gate_logits: Sequence[Tensor], num_warps: int = 4) -> Launch:
    """A program per tile: unlike the sums, nothing carries over from one tile to the next."""
    tokens = _tokens_per_tile(gate_logits[0], num_warps)
    return Launch(tokens, ceil_div(len(gate_logits[0]), tokens), num_warps)


def loss_and_slope(
    gate_logits: Sequence[Tensor], top_k: int, mask: Tensor | None, launch: Launch
) -> tuple[Tensor, Tensor]:
    """The loss, and its derivative ``[E]`` by the experts' probabilities, the same for every token that counts.

    Args:
        gate_logits: ``L`` tensors ``[T, E]``.
        top_k: ``K``.
        mask: ``T`` elements, or ``None``.
        launch: That of the sums; the loss has one program.
    """
    layers = tuple(logits.contiguous() for logits in gate_logits)
    tokens, experts = layers[0].shape
    sums = layers[0].new_empty(len(layers) * launch.programs, 2, _width(experts), dtype=torch.float32)
    loss, slope = sums.new_empty(()), sums.new_empty(experts)
    sizes = {"EXPERTS": experts, "K": top_k, "WIDTH": _width(experts)}
    with torch.cuda.device_of(loss):
        sums_kernel[launch.programs, len(layers)](
            layers,
            _per_token(mask),
            sums,
            tokens,
            LAYERS=len(layers),
            TOKENS=launch.tokens,
            STAGES=launch.stages,
            num_warps=launch.num_warps,
            **register_limit(loss.device, launch.registers),
            **sizes,
        )
        # One program, so that all sums are added in one order; a tile of 8192 elements over 16 warps is 16 a thread.
        loss_kernel[1,](sums, loss, slope, len(sums), ROWS=max(1, 8192 // _width(experts)), num_warps=16, **sizes)
    return loss, slope


def gradients(
    dloss: Tensor, slope: Tensor, gate_logits: Sequence[Tensor], mask: Tensor | None, launch: Launch
) -> Tensor:
    """The gradients ``[L, T, E]`` of the given layers' logits, in one buffer, since one launch writes them all.

    Args:
        dloss: A scalar.
        slope: ``[E]``, from :func:`loss_and_slope`.
        gate_logits: ``L`` tensors ``[T, E]``: the layers that need gradients.
        mask: ``T`` elements, or ``None``.
        launch: Tokens per tile and programs.
    """
    layers = tuple(logits.contiguous() for logits in gate_logits)
    tokens, experts = layers[0].shape
    dlogits = layers[0].new_empty(len(layers), tokens, experts)
    with torch.cuda.device_of(dlogits):
        gradients_kernel[launch.programs, len(layers)](
            layers,
            _per_token(mask),
            dloss,
            slope,
            dlogits,
            tokens,
            LAYERS=len(layers),
            EXPERTS=experts,
            TOKENS=launch.tokens,
            WIDTH=_width(experts),
            num_warps=launch.num_warps,
            # Fused, `d - sum` subtracts a rounded sum from a product that isn't: 1.4e-9 where one expert has to give 0.
            enable_fp_fusion=False,
        )
    return dlogits


def _per_token(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.reshape(-1)


def _width(experts: int) -> int:
    """The columns of a tile: a power of two, as tl.arange needs, that can be cut into four quarters."""
    return max(4, power_of_two(experts))


def _tokens_per_tile(logits: Tensor, num_warps: int) -> int:
    """As many tokens as give each thread 32 logits: the search for the top k keeps four copies of them in registers."""
    return max(1, 32 * 32 * num_warps // _width(logits.shape[1]))


def _forward_operator(gate_logits: Sequence[Tensor], top_k: int, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    return loss_and_slope(gate_logits, top_k, mask, sums_launch(gate_logits))


def _forward_fake(gate_logits: Sequence[Tensor], *_: object) -> tuple[Tensor, Tensor]:
    logits = gate_logits[0]
    return logits.new_empty((), dtype=torch.float32), logits.new_empty(logits.shape[1], dtype=torch.float32)


def _backward_operator(dloss: Tensor, slope: Tensor, gate_logits: Sequence[Tensor], mask: Tensor | None) -> Tensor:
    return gradients(dloss, slope, gate_logits, mask, gradients_launch(gate_logits))


def _backward_fake(dloss: Tensor, slope: Tensor, gate_logits: Sequence[Tensor], mask: Tensor | None) -> Tensor:
    return gate_logits[0].new_empty(len(gate_logits), *gate_logits[0].shape)


_forward = operator(
    "veomni_triton_moe::load_balancing_loss_forward(Tensor[] gate_logits, int top_k, Tensor? mask) -> (Tensor loss,"
    " Tensor slope)",
    _forward_operator,
    _forward_fake,
)
_backward = operator(
    "veomni_triton_moe::load_balancing_loss_backward(Tensor dloss, Tensor slope, Tensor[] gate_logits, Tensor? mask)"
    " -> Tensor",
    _backward_operator,
    _backward_fake,
)
