"""dsa_attention's operators: what each kernel is launched with, and how many queries at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from veomni_ops.sizes import ceil_div, power_of_two
from veomni_ops.torch_operators import operator
from veomni_ops.triton_gpus import gpu_of
from veomni_triton.dsa_attention import kernels

_INPUTS = "Tensor query, Tensor keys, Tensor indices, float scaling, int value_width"
_SAVED = "Tensor doutput, Tensor output, Tensor norms"
# Weights in memory at a time. Backward has gradients beside them, and an H100's cache takes 50 MB.
_WEIGHTS, _WEIGHTS_BACKWARD = 1 << 24, 3 << 22


@dataclass(frozen=True)
class Launch:
    """Heads, keys and columns of a tile, warps, and the depth of the loop's pipeline."""

    heads: int
    keys: int
    columns: int
    warps: int
    stages: int


# The fastest that were tried on an H100, with 128 heads, latents of 512 and 64 columns, and 2048 keys.
WEIGHTS, OUTPUTS = Launch(128, 256, 64, 8, 3), Launch(128, 128, 256, 8, 2)
LOGIT_GRADIENTS, QUERY_GRADIENTS = Launch(64, 256, 64, 8, 3), Launch(128, 64, 128, 8, 3)
KEY_GRADIENTS = Launch(128, 256, 32, 8, 3)
BYTES = 208 << 10  # of shared memory, which these take
SMALL = Launch(16, 16, 64, 4, 1)  # in float32, and for GPUs that have less


def _forward(query: Tensor, keys: Tensor, indices: Tensor, scaling: float, value_width: int) -> tuple[Tensor, Tensor]:
    output, norms = _results(query, keys, indices, scaling, value_width)
    query, keys, indices = query.contiguous(), keys.contiguous(), indices.contiguous()
    rows, (_, _, heads, top_k, width) = query.shape[:2].numel(), (sizes := _sizes(query, keys, indices))
    if not output.numel():
        return output, norms
    of_weights, of_outputs = _tiles(query, WEIGHTS, width), _tiles(query, OUTPUTS, value_width)
    part, by_two = _part(rows, heads * top_k, _WEIGHTS), scaling / math.log(2)
    tiles, columns = ceil_div(top_k, of_weights["K"]), ceil_div(value_width, of_outputs["C"])
    weights, maxima = query.new_empty(part, heads, top_k), norms.new_empty(2, part, tiles, heads)
    with torch.cuda.device_of(query):
        for first in range(0, rows, part):
            count = min(part, rows - first)
            kernels.weights_kernel[count, tiles, ceil_div(heads, of_weights["H"])](
                query, keys, indices, weights, *maxima, by_two, first, *sizes, **of_weights
            )
            tensors = (weights, keys, indices, *maxima, output, *norms)
            kernels.outputs_kernel[count, columns, ceil_div(heads, of_outputs["H"])](
                *tensors, by_two, first, *sizes, value_width, tiles, TILE=of_weights["K"], **of_outputs
            )
    return output, norms


def _gradients(
    doutput: Tensor,
    output: Tensor,
    norms: Tensor,
    query: Tensor,
    keys: Tensor,
    indices: Tensor,
    scaling: float,
    value_width: int,
) -> tuple[Tensor, Tensor]:
    dquery, dkeys = query.new_empty(query.shape), keys.new_zeros(keys.shape, dtype=torch.float32)
    query, keys, indices, doutput = query.contiguous(), keys.contiguous(), indices.contiguous(), doutput.contiguous()
    rows, (_, _, heads, top_k, width) = query.shape[:2].numel(), (sizes := _sizes(query, keys, indices))
    if not query.numel():
        return dquery, dkeys.to(keys.dtype)
    of_logits, of_queries = _tiles(query, LOGIT_GRADIENTS, value_width), _tiles(query, QUERY_GRADIENTS, width)
    of_keys = _tiles(query, KEY_GRADIENTS, value_width)
    part, by_two = _part(rows, heads * top_k, _WEIGHTS_BACKWARD), scaling / math.log(2)
    (weights, dlogits), means = query.new_empty(2, part, heads, top_k), torch.empty_like(norms[0])
    with torch.cuda.device_of(query):
        kernels.means_kernel[(ceil_div(means.numel(), 16),)](
            output, doutput, means, means.numel(), value_width, H=16, C=power_of_two(value_width)
        )
        for first in range(0, rows, part):
            count = min(part, rows - first)
            tensors = (query, keys, indices, *norms, means, doutput, weights, dlogits)
            kernels.logit_gradients_kernel[count, ceil_div(top_k, of_logits["K"]), ceil_div(heads, of_logits["H"])](
                *tensors, scaling, by_two, first, *sizes, value_width, **of_logits
            )
            kernels.query_gradients_kernel[count, ceil_div(width, of_queries["C"]), ceil_div(heads, of_queries["H"])](
                dlogits, keys, indices, dquery, first, *sizes, **of_queries
            )
            kernels.key_gradients_kernel[count, ceil_div(top_k, of_keys["K"]), ceil_div(heads, of_keys["H"])](
                query, doutput, indices, weights, dlogits, dkeys, first, *sizes, value_width, **of_keys
            )
    return dquery, dkeys.to(keys.dtype)


def _target(norms: Tensor, query: Tensor, keys: Tensor, indices: Tensor, scaling: float, value_width: int) -> Tensor:
    target = indices.new_empty(indices.shape, dtype=torch.float32)
    query, keys, indices = query.contiguous(), keys.contiguous(), indices.contiguous()
    if target.numel():
        rows, (*_, top_k, width) = query.shape[:2].numel(), (sizes := _sizes(query, keys, indices))
        tiles = _tiles(query, WEIGHTS, width)
        with torch.cuda.device_of(query):
            kernels.target_kernel[rows, ceil_div(top_k, tiles["K"])](
                query, keys, indices, *norms, target, scaling / math.log(2), *sizes, **tiles
            )
    return target


def _sizes(query: Tensor, keys: Tensor, indices: Tensor) -> tuple[int, int, int, int, int]:
    """Queries and keys of a batch row, heads, chosen keys, and columns."""
    _, queries, heads, width = query.shape
    return queries, keys.shape[1], heads, indices.shape[2], width


def _part(rows: int, weights: int, most: int) -> int:
    """Of ``rows`` queries with so many weights each, how many have ``most`` together; one at least."""
    return max(1, min(rows, most // max(1, weights)))


def _tiles(query: Tensor, launch: Launch, columns: int) -> dict[str, Any]:
    """What a kernel is compiled with, whose tensors have so many columns."""
    if query.dtype == torch.float32 or gpu_of(query.device).shared_bytes < BYTES:
        launch = SMALL
    return {
        "H": max(16, min(launch.heads, power_of_two(query.shape[2]))),
        "K": launch.keys,
        "C": max(16, min(launch.columns, power_of_two(columns))),
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
        "num_warps": launch.warps,
        "num_stages": launch.stages,
    }


def _results(query: Tensor, keys: Tensor, indices: Tensor, scaling: float, value_width: int) -> tuple[Tensor, Tensor]:
    """The output ``[B, T, H, V]``, and for each query and head its highest logit and its sum ``[2, B, T, H]``."""
    return query.new_empty(*query.shape[:3], value_width), query.new_empty(2, *query.shape[:3], dtype=torch.float32)


def _gradients_like(
    doutput: Tensor, output: Tensor, norms: Tensor, query: Tensor, keys: Tensor, *others: object
) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), keys.new_empty(keys.shape)


dsa_attention_forward = operator(
    f"veomni_triton::dsa_attention_forward({_INPUTS}) -> (Tensor output, Tensor norms)", _forward, _results
)
dsa_attention_gradients = operator(
    f"veomni_triton::dsa_attention_gradients({_SAVED}, {_INPUTS}) -> (Tensor dquery, Tensor dkeys)",
    _gradients,
    _gradients_like,
)
dsa_attention_target = operator(
    f"veomni_triton::dsa_attention_target(Tensor norms, {_INPUTS}) -> Tensor",
    _target,
    lambda norms, query, keys, indices, *_: indices.new_empty(indices.shape, dtype=torch.float32),
)
