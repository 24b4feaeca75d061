"""Native sparse attention in plain PyTorch: a block of queries at a time, and again in backward.

Memory beyond inputs, outputs and their gradients is that of one block: its logits, and the keys of the blocks that its
queries chose. The choice is saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from veomni_core.kernels import first_derivatives_only, product_operands, without_autocast
from veomni_ops.contract import compute_dtype
from veomni_ops.native_sparse import Places, Sizes, blocks_of, bounds_of, check_call, chosen_blocks

_CPU_BLOCK, _ACCELERATOR_BLOCK = 1 << 20, 1 << 26  # numbers in the tensors of a block


def native_sparse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    compressed_key: Tensor,
    compressed_value: Tensor,
    gates: Tensor,
    window_key: Tensor | None = None,
    window_value: Tensor | None = None,
    cu_seq_lens: Tensor | None = None,
    scaling: float | None = None,
    **sizes: int,
) -> Tensor:
    """``[B, T, H, V]``, with gradients of all tensors but the bounds.

    Raises:
        ValueError: shapes, dtypes or sizes don't fit together.
        TypeError: keys or values differ from query in dtype without autocast.
    """
    made = Sizes(**sizes)
    names = ("query", "key", "value", "compressed_key", "compressed_value", "window_key", "window_value")
    window_key, window_value = (
        key if window_key is None else window_key,
        value if window_value is None else window_value,
    )
    given = query, key, value, compressed_key, compressed_value, window_key, window_value
    named: Any = dict(zip(names, given, strict=True))
    tensors = product_operands("torch", **named)
    query, key, value, compressed_key, compressed_value, window_key, window_value = tensors
    check_call(query, key, value, compressed_key, compressed_value, gates, window_key, window_value, cu_seq_lens, made)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return _NativeSparse.apply(*tensors, gates, cu_seq_lens, scaling, made)  # type: ignore[no-any-return]


class _Inputs(NamedTuple):
    """The inputs, flat over the batch: ``query[N, G, H / G, D]``, ``gates[N, G, H / G, 3]``, ``keys[N or M, G, D]``.

    Of a block of queries: its queries and gates, all compressed keys, for each query the keys of its blocks
    ``[n, G, K * block_size, D]``, and the keys of the windows, all in the dtype of arithmetic.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    compressed_key: Tensor
    compressed_value: Tensor
    window_key: Tensor
    window_value: Tensor
    gates: Tensor


class _Masks(NamedTuple):
    complete: Tensor
    chosen: Tensor
    window: Tensor


def _flat(tensors: tuple[Tensor, ...]) -> _Inputs:
    groups = tensors[1].shape[2]
    flat = [each.flatten(0, 1) for each in tensors]
    flat[0], flat[7] = (each.unflatten(1, (groups, each.shape[1] // groups)) for each in (flat[0], flat[7]))
    return _Inputs(*flat)


def _weights(query: Tensor, key: Tensor, visible: Tensor, scaling: float, product: str) -> Tensor:
    logits = torch.einsum(product, query, key) * scaling
    hidden = ~visible & visible.any(-1, keepdim=True)  # nothing for a query without a key, for which all would be NaN
    return logits.masked_fill(hidden.unsqueeze(2), -torch.inf).softmax(-1).masked_fill(~visible.unsqueeze(2), 0.0)


def _compressed(block: _Inputs, masks: _Masks, scaling: float) -> Tensor:
    return _weights(block.query, block.compressed_key, masks.complete, scaling, "ngrd,sgd->ngrs")


def _mixed(block: _Inputs, masks: _Masks, scaling: float) -> Tensor:
    """The output ``[n, G, H / G, V]`` of a block of queries."""
    chosen = _weights(block.query, block.key, masks.chosen, scaling, "ngrd,ngsd->ngrs")
    window = _weights(block.query, block.window_key, masks.window, scaling, "ngrd,sgd->ngrs")
    branches = (
        torch.einsum("ngrs,sgv->ngrv", _compressed(block, masks, scaling), block.compressed_value),
        torch.einsum("ngrs,ngsv->ngrv", chosen, block.value),
        torch.einsum("ngrs,sgv->ngrv", window, block.window_value),
    )
    return (torch.stack(branches, -1) * block.gates.unsqueeze(3)).sum(-1)


class _Blocks:
    """What all blocks of a call share."""

    def __init__(self, tensors: tuple[Tensor, ...], cu_seq_lens: Tensor | None, sizes: Sizes, scaling: float) -> None:
        self.scaling = scaling
        self.wide, self.sizes, self.row = compute_dtype(tensors[0]), sizes, tensors[0].shape[1]
        self.inputs = _flat(tensors)
        self.tokens, self.groups = self.inputs.key.shape[:2]
        self.places = Places.of(self.tokens, bounds_of(tensors[0], cu_seq_lens), sizes)
        self.count = min(sizes.block_count, blocks_of(self.row, sizes))

    def rows(self) -> Iterator[slice]:
        """The queries that are computed together, as many as keep a block's tensors small."""
        query, value = self.inputs.query, self.inputs.value
        chosen = self.count * self.sizes.block_size
        each = query.shape[1:3].numel() * (len(self.inputs.compressed_key) + chosen + 2 * self.sizes.window)
        each += self.groups * chosen * (query.shape[3] + value.shape[2])
        budget = _CPU_BLOCK if query.device.type == "cpu" else _ACCELERATOR_BLOCK
        size = max(1, min(self.sizes.window, budget // max(1, each)))
        for first in range(0, self.tokens, size):
            yield slice(first, min(first + size, self.tokens))

    def window(self, rows: slice) -> slice:
        return slice(max(0, rows.start - self.sizes.window + 1), rows.stop)

    def complete(self, rows: slice) -> Tensor:
        place = torch.arange(len(self.inputs.compressed_key), device=self.inputs.key.device)
        begin, stop = (x[rows, None] for x in (self.places.compressed_begin, self.places.compressed_stop))
        return ((place >= begin) & (place < stop)).unsqueeze(1)

    def choose(self, rows: slice) -> Tensor:
        """int32 ``[n, G, K]``."""
        query, key = self.inputs.query[rows].to(self.wide), self.inputs.compressed_key.to(self.wide)
        weights = _weights(query, key, self.complete(rows), self.scaling, "ngrd,sgd->ngrs").sum(2)
        of_rows = Places(*(x if x is self.places.first_block else x[rows] for x in vars(self.places).values()))
        return chosen_blocks(weights, of_rows, blocks_of(self.row, self.sizes), self.sizes)

    def taken(self, rows: slice, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens of chosen blocks ``[n, G, K * block_size]``, and which of them are keys of the query."""
        device = chosen.device
        within = torch.arange(self.sizes.block_size, device=device)
        token = chosen.long().unsqueeze(-1) * self.sizes.block_size + within
        token = token + self.places.begin[rows].view(-1, 1, 1, 1)
        last = torch.arange(rows.start, rows.stop, device=device).view(-1, 1, 1, 1)
        is_key = ((chosen >= 0).unsqueeze(-1) & (token <= last)).flatten(2)
        return token.flatten(2).masked_fill(~is_key, 0), is_key

    def masks(self, rows: slice, is_key: Tensor) -> _Masks:
        device = is_key.device
        query = torch.arange(rows.start, rows.stop, device=device)[:, None]
        token = torch.arange(self.window(rows).start, rows.stop, device=device)
        seen = (token <= query) & (token > query - self.sizes.window) & (token >= self.places.begin[rows, None])
        return _Masks(self.complete(rows), is_key, seen.unsqueeze(1))

    def of(self, rows: slice, taken: Tensor) -> _Inputs:
        x, window = self.inputs, self.window(rows)
        group = torch.arange(self.groups, device=taken.device)[:, None]
        parts = (
            x.query[rows],
            x.key[taken, group],
            x.value[taken, group],
            x.compressed_key,
            x.compressed_value,
            x.window_key[window],
            x.window_value[window],
            x.gates[rows],
        )
        return _Inputs(*(each.to(self.wide) for each in parts))


class _NativeSparse(Function):
    @staticmethod
    @without_autocast
    def forward(ctx: Any, *call: Any) -> Tensor:
        *tensors, cu_seq_lens, scaling, sizes = call
        blocks = _Blocks(tuple(tensors), cu_seq_lens, sizes, scaling)
        inputs = blocks.inputs
        output = torch.empty(
            *inputs.query.shape[:3], inputs.value.shape[2], dtype=inputs.query.dtype, device=inputs.query.device
        )
        chosen = torch.empty(blocks.tokens, blocks.groups, blocks.count, dtype=torch.int32, device=output.device)
        for rows in blocks.rows():
            chosen[rows] = blocks.choose(rows)
            taken, is_key = blocks.taken(rows, chosen[rows])
            output[rows] = _mixed(blocks.of(rows, taken), blocks.masks(rows, is_key), scaling).to(output.dtype)
        ctx.save_for_backward(*tensors, cu_seq_lens, chosen)
        ctx.settings = scaling, sizes
        return output.view(*tensors[0].shape[:3], tensors[2].shape[3])

    @staticmethod
    @first_derivatives_only
    @without_autocast
    def backward(ctx: Any, doutput: Tensor) -> tuple[Any, ...]:
        *tensors, cu_seq_lens, chosen = ctx.saved_tensors
        scaling, sizes = ctx.settings
        blocks = _Blocks(tuple(tensors), cu_seq_lens, sizes, scaling)
        needed = ctx.needs_input_grad[:8]
        found = [
            x.new_zeros(x.shape, dtype=blocks.wide) if wanted else None
            for x, wanted in zip(blocks.inputs, needed, strict=True)
        ]
        doutput = doutput.reshape(*blocks.inputs.query.shape[:3], doutput.shape[3])
        for rows in blocks.rows() if any(needed) else ():
            taken, is_key = blocks.taken(rows, chosen[rows])
            leaves = _Inputs(
                *(x.detach().requires_grad_(wanted) for x, wanted in zip(blocks.of(rows, taken), needed, strict=True))
            )
            with torch.enable_grad():
                output = _mixed(leaves, blocks.masks(rows, is_key), scaling)
            sought = [x for x in leaves if x.requires_grad]
            gradients = iter(torch.autograd.grad(output, sought, doutput[rows].to(blocks.wide)))
            window = blocks.window(rows)
            for into, name in zip(found, _Inputs._fields, strict=True):
                if into is None:
                    continue
                gradient = next(gradients)
                if name in ("key", "value"):
                    _scatter(into, gradient, taken, is_key)
                else:
                    place = window if name.startswith("window") else rows
                    (into if name.startswith("compressed") else into[place]).add_(gradient)
        cast = (x if x is None else x.view(each.shape).to(each.dtype) for x, each in zip(found, tensors, strict=True))
        return *cast, None, None, None


def _scatter(into: Tensor, gradient: Tensor, taken: Tensor, is_key: Tensor) -> None:
    """Add to each key ``[N, G, D]`` the gradients ``[n, G, S, D]`` that it got where it was chosen."""
    groups = into.shape[1]
    place = taken * groups + torch.arange(groups, device=taken.device)[:, None]
    into.view(-1, into.shape[2]).index_add_(
        0, place.flatten(), gradient.masked_fill(~is_key.unsqueeze(-1), 0.0).flatten(0, 2)
    )
