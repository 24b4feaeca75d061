"""npu_moe_token_permute sorts tokens by expert; npu_moe_token_unpermute brings them back and weighs them."""

from __future__ import annotations

import torch
from torch import Tensor

from npu_sim.operators.limits import require, require_dims, require_dtype

PERMUTE, UNPERMUTE = "npu_moe_token_permute", "npu_moe_token_unpermute"
SCHEMAS = {
    "npu_moe_token_permute": (
        "(Tensor tokens, Tensor indices, int? num_out_tokens=None, bool padded_mode=False) -> (Tensor, Tensor)"
    ),
    "npu_moe_token_permute_grad_v2": (
        "(Tensor grad_permuted_tokens, Tensor sorted_indices, SymInt tokens_size_0, ScalarType tokens_dtype, "
        "SymInt num_topK, bool padded_mode=False) -> Tensor"
    ),
    "npu_moe_token_unpermute": (
        "(Tensor permuted_tokens, Tensor sorted_indices, Tensor? probs=None, bool padded_mode=False, "
        "int[]? restore_shape=None) -> Tensor"
    ),
    "npu_moe_token_unpermute_grad": (
        "(Tensor permuted_tokens, Tensor grad_unpermuted_tokens, Tensor sorted_indices, Tensor? probs=None, "
        "bool padded_mode=False, int[]? restore_shape=None) -> (Tensor, Tensor)"
    ),
}
MOST_INDICES = LARGEST_INDEX = 16777215
LARGEST_TOP_K = 512
INDEX_TYPES = (torch.int32, torch.int64)


def npu_moe_token_permute(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[Tensor, Tensor]:
    """Rows of ``tokens`` [T, H], each once per expert in ``indices`` [T, K] or [T], stably sorted by expert.

    ``sorted_indices`` [T * K], int32, says where row ``i // K`` went: ``permuted[sorted_indices[i]] = tokens[i // K]``.
    A positive ``num_out_tokens`` keeps that many rows, a negative one drops as many, 0 and None keep all.
    """
    require_dtype(PERMUTE, "tokens", tokens)
    require_dims(PERMUTE, "tokens", tokens, (2,))
    require_dtype(PERMUTE, "indices", indices, INDEX_TYPES)
    require_dims(PERMUTE, "indices", indices, (1, 2))
    _require_unpadded(PERMUTE, padded_mode)
    require(indices.numel() < MOST_INDICES, f"{PERMUTE}: indices must hold fewer than {MOST_INDICES} elements")
    require(
        bool(((indices >= 0) & (indices < LARGEST_INDEX)).all()), f"{PERMUTE}: indices must be in [0, {LARGEST_INDEX})"
    )
    top_k = indices.shape[1] if indices.dim() == 2 else 1
    require(indices.shape[0] == tokens.shape[0], f"{PERMUTE}: {tokens.shape[0]} tokens, {indices.shape[0]} indices")
    require(top_k <= LARGEST_TOP_K, f"{PERMUTE}: topK must be at most {LARGEST_TOP_K}, but got {top_k}")
    order = indices.flatten().argsort(stable=True)
    kept = order[: num_out_tokens or None]
    return tokens[kept // top_k], order.argsort().int()


def npu_moe_token_permute_grad_v2(
    grad_permuted_tokens: Tensor,
    sorted_indices: Tensor,
    tokens_size_0: int,
    tokens_dtype: torch.dtype,
    num_topK: int,
    padded_mode: bool = False,
) -> Tensor:
    """The gradient of ``tokens``: the sum over each token's rows, where they were kept."""
    _require_unpadded(PERMUTE, padded_mode)
    rows = _rows(grad_permuted_tokens, sorted_indices).float()
    return rows.view(tokens_size_0, num_topK, -1).sum(1).to(tokens_dtype)


def npu_moe_token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: list[int] | None = None,
) -> Tensor:
    """Rows [T * K, H] in their first order, weighted by ``probs`` [T, K] and summed per token: [T, H] in their dtype.

    Without ``probs`` K is 1 and nothing is weighted. ``sorted_indices`` [T * K] is int32, without repetition.
    """
    _require_unpermute_limits(permuted_tokens, sorted_indices, probs, padded_mode, restore_shape)
    rows = _rows(permuted_tokens, sorted_indices).float()
    if probs is None:
        return rows.to(permuted_tokens.dtype)
    return (rows.view(*probs.shape, -1) * probs.float().unsqueeze(-1)).sum(1).to(permuted_tokens.dtype)


def npu_moe_token_unpermute_grad(
    permuted_tokens: Tensor,
    grad_unpermuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: list[int] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The gradients of ``permuted_tokens`` and of ``probs``, each in its dtype."""
    _require_unpermute_limits(permuted_tokens, sorted_indices, probs, padded_mode, restore_shape)
    grad = grad_unpermuted_tokens.float()
    spread = grad if probs is None else (grad.unsqueeze(1) * probs.float().unsqueeze(-1)).flatten(0, 1)
    dpermuted = torch.zeros_like(permuted_tokens).index_put((sorted_indices.long(),), spread.to(permuted_tokens.dtype))
    if probs is None:
        return dpermuted, None
    rows = _rows(permuted_tokens, sorted_indices).float().view(*probs.shape, -1)
    return dpermuted, (rows * grad.unsqueeze(1)).sum(-1).to(probs.dtype)


def _rows(permuted: Tensor, sorted_indices: Tensor) -> Tensor:
    """The rows in their first order; those that permuting dropped are zeros."""
    padding = max(0, sorted_indices.numel() - permuted.shape[0])
    return torch.nn.functional.pad(permuted, (0, 0, 0, padding))[sorted_indices.long()]


def _require_unpadded(operator: str, padded_mode: bool, restore_shape: list[int] | None = None) -> None:
    require(not padded_mode and restore_shape is None, f"{operator}: only padded_mode=False without restore_shape")


def _require_unpermute_limits(
    permuted: Tensor, sorted_indices: Tensor, probs: Tensor | None, padded_mode: bool, restore_shape: list[int] | None
) -> None:
    require_dtype(UNPERMUTE, "permuted_tokens", permuted)
    require_dims(UNPERMUTE, "permuted_tokens", permuted, (2,))
    require_dtype(UNPERMUTE, "sorted_indices", sorted_indices, (torch.int32,))
    require_dims(UNPERMUTE, "sorted_indices", sorted_indices, (1,))
    _require_unpadded(UNPERMUTE, padded_mode, restore_shape)
    count = sorted_indices.numel()
    require(permuted.shape[0] == count, f"{UNPERMUTE}: {permuted.shape[0]} rows, but {count} sorted_indices")
    require(
        bool((sorted_indices.sort().values == torch.arange(count)).all()),
        f"{UNPERMUTE}: sorted_indices must hold every index from 0 to {count - 1} once",
    )
    if probs is not None:
        require_dtype(UNPERMUTE, "probs", probs)
        require_dims(UNPERMUTE, "probs", probs, (2,))
        require(probs.numel() == count, f"{UNPERMUTE}: probs of shape {tuple(probs.shape)} for {count} rows")
        require(probs.shape[1] <= LARGEST_TOP_K, f"{UNPERMUTE}: topK must be at most {LARGEST_TOP_K}")


def _permuted_shapes(tokens: Tensor, indices: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    routes = indices.numel()
    return tokens.new_empty(routes, tokens.shape[1]), indices.new_empty(routes, dtype=torch.int32)


def _unpermuted_shape(permuted: Tensor, sorted_indices: Tensor, probs: Tensor | None = None, *_: object) -> Tensor:
    return permuted.new_empty(len(sorted_indices) if probs is None else probs.shape[0], permuted.shape[1])


KERNELS = {name: globals()[name] for name in SCHEMAS}
META = {PERMUTE: _permuted_shapes, UNPERMUTE: _unpermuted_shape}


def _save_permute(ctx, inputs, output) -> None:
    tokens, indices, *_ = inputs
    ctx.tokens, ctx.dtype, ctx.top_k = tokens.shape[0], tokens.dtype, indices.numel() // max(1, tokens.shape[0])
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def _permute_gradients(ctx, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    (sorted_indices,) = ctx.saved_tensors
    dtokens = torch.ops.npu.npu_moe_token_permute_grad_v2(grad, sorted_indices, ctx.tokens, ctx.dtype, ctx.top_k)
    return dtokens, None, None, None


def _save_unpermute(ctx, inputs, output) -> None:
    permuted, sorted_indices, probs, *_ = inputs
    ctx.save_for_backward(permuted, sorted_indices, probs)


def _unpermute_gradients(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
    permuted, sorted_indices, probs = ctx.saved_tensors
    dpermuted, dprobs = torch.ops.npu.npu_moe_token_unpermute_grad(permuted, grad, sorted_indices, probs)
    return dpermuted, None, dprobs, None, None


AUTOGRAD = {
    "npu_moe_token_permute": (_save_permute, _permute_gradients),
    "npu_moe_token_unpermute": (_save_unpermute, _unpermute_gradients),
}
