"""dsa_indexer in Triton: scores on matrix units, of a block of queries at a time, then the highest of each row.

The scores of a block are all that is in memory: a number for each of its queries and each key. The least of a row's
chosen scores is found by its bits, so that ties are exact, and every run chooses the same keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from veomni_core.kernels import product_operands
from veomni_ops.dsa_indexer import check_call
from veomni_ops.sizes import ceil_div, power_of_two
from veomni_ops.torch_operators import operator
from veomni_triton.dsa_indexer.kernels import highest_kernel, scores_kernel

_SCORES = 1 << 26  # numbers of a block's scores, 256 MiB
_TILE, _ROW_TILE = 1024, 1024  # numbers that a program reads at a time, and of a row
# Queries and keys of a tile, and warps. Not tuned.
SIXTEEN_BITS, FLOAT32 = (64, 128, 8), (32, 32, 4)
_MINUS_INFINITY = 0x007FFFFF  # in the order of the kernel


@torch.no_grad()
def standard(query: Tensor, key: Tensor, weights: Tensor, visible: Tensor, top_k: int) -> Tensor:
    """int32 ``[B, T, min(top_k, S)]``: of each query the chosen keys, rising, and then -1 where it sees fewer.

    Raises:
        ValueError: shapes or dtypes don't fit together.
        TypeError: query and key differ in dtype without autocast, or are of none of float32, bfloat16 and float16.
    """
    of_16_and_32_bits = (torch.float32, torch.bfloat16, torch.float16)
    query, key = product_operands("triton", dtypes=of_16_and_32_bits, query=query, key=key)
    check_call(query, key, weights, visible, top_k)
    return _choose(query, key, weights, visible, top_k)  # type: ignore[no-any-return]


def _chosen(query: Tensor, key: Tensor, weights: Tensor, visible: Tensor, top_k: int) -> Tensor:
    found = _like(query, key, weights, visible, top_k)
    batch, length, heads, width = query.shape
    keys, top_k = key.shape[1], found.shape[2]
    if not found.numel():
        return found
    query, key, weights, visible = (
        query.contiguous(),
        key.contiguous(),
        weights.float().contiguous(),
        visible.contiguous(),
    )
    bools = visible.dtype == torch.bool
    visible = visible.view(torch.uint8) if bools else visible
    M, N, warps = FLOAT32 if query.dtype == torch.float32 else SIXTEEN_BITS
    size = min(length, max(M, _SCORES // keys))
    scores = query.new_empty(size, keys, dtype=torch.int32)
    with torch.cuda.device_of(query):
        for row in range(batch):
            for first in range(0, length, size):
                rows = min(size, length - first)
                scores_kernel[ceil_div(rows, M), ceil_div(keys, N)](
                    query[row],
                    key[row],
                    weights[row],
                    visible[row],
                    scores,
                    first,
                    rows,
                    keys,
                    heads,
                    width,
                    M=M,
                    N=N,
                    D=max(16, power_of_two(width)),
                    BOOLS=bools,
                    PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
                    num_warps=warps,
                )
                columns = min(_ROW_TILE, power_of_two(keys))
                highest_kernel[ceil_div(rows, _TILE // columns),](
                    scores,
                    visible[row, first],
                    found[row, first],
                    rows,
                    keys,
                    top_k,
                    NONE=_MINUS_INFINITY,
                    BOOLS=bools,
                    R=_TILE // columns,
                    N=columns,
                    num_warps=4,
                )
    return found


def _like(query: Tensor, key: Tensor, weights: Tensor, visible: Tensor, top_k: int) -> Tensor:
    return query.new_empty(*query.shape[:2], min(top_k, key.shape[1]), dtype=torch.int32)


_choose = operator(
    "veomni_triton::dsa_indexer(Tensor query, Tensor key, Tensor weights, Tensor visible, int top_k) -> Tensor",
    _chosen,
    _like,
)
