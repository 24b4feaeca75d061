"""native_sparse's operators: forward and gradients of three branches, and the choice of blocks between them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from veomni_ops.native_sparse import Sizes, blocks_of
from veomni_ops.sizes import ceil_div, power_of_two
from veomni_ops.torch_operators import operator
from veomni_triton.native_sparse import chosen_blocks, key_ranges, launches, mixing

_KEYS = "Tensor key, Tensor value, Tensor compressed_key, Tensor compressed_value, Tensor? wkey, Tensor? wvalue"
_INPUTS = f"Tensor query, {_KEYS}, Tensor gates, Tensor? cu_seq_lens, float scaling, int[] sizes"
_SUMS = 1 << 26  # numbers of a block's sums, 256 MiB
SHARE = 4  # heads of a program of the gradients of compressed keys
PART = 4096  # queries of a program of the gradients of a block's keys


def _forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    output, branches, norms, chosen = _results(*arguments)
    if not output.numel():
        return output, branches, norms, chosen
    call = launches.Call(arguments[:8], arguments[8], arguments[9], Sizes(*arguments[10]))
    with torch.cuda.device_of(output):
        _attend_ranges(call, *call.compressed, call.complete, branches[0], norms[0])
        _choose(call, norms[0], chosen)
        chosen_blocks.chosen_forward_kernel[call.tokens, call.groups](
            call.query,
            call.key,
            call.value,
            call.begins,
            chosen,
            branches[1],
            norms[1],
            call.by_two,
            *call.counts(),
            chosen.shape[-1],
            call.sizes.block_size,
            **call.of_blocks(launches.CHOSEN),
        )
        _attend_ranges(call, *call.window, call.last_keys, branches[2], norms[2])
        rows, columns, width = _rows(call)
        mixing.mix_kernel[ceil_div(rows, columns),](
            branches, call.gates, output, rows, width=call.value_width, R=columns, V=width
        )
    return output, branches, norms, chosen


def _rows(call: launches.Call) -> tuple[int, int, int]:
    """Rows of the output, those of a program, and the columns of one, padded."""
    width = power_of_two(call.value_width)
    return call.tokens * call.heads, max(1, 4096 // width), width


def _attend_ranges(
    call: launches.Call, key: Tensor, value: Tensor, ranges: tuple[Tensor, Tensor], output: Tensor, norms: Tensor
) -> None:
    constants = call.of_ranges(launches.FORWARD)
    key_ranges.range_forward_kernel[ceil_div(call.tokens, constants["M"]), call.heads](
        call.query, key, value, *ranges, output, norms, call.by_two, call.tokens, *call.counts(), **constants
    )


def _choose(call: launches.Call, norms: Tensor, chosen: Tensor) -> None:
    """Fill ``chosen[B, T, G, K]``, of some queries at a time."""
    key, sizes = call.compressed[0], call.sizes
    keys = max(1, key.shape[:2].numel())
    launch = call.fitting(launches.SUMS)
    size = min(call.tokens, max(launch.queries, _SUMS // (keys * call.groups)))
    sums = key.new_empty(call.groups, size, keys, dtype=torch.float32)
    constants = call.of_ranges(launches.SUMS)
    del constants["V"], constants["value_width"]
    blocks = power_of_two(blocks_of(call.row, sizes))
    for first in range(0, call.tokens, size):
        rows = min(size, call.tokens - first)
        key_ranges.sums_kernel[ceil_div(rows, launch.queries), ceil_div(keys, launch.keys), call.groups](
            call.query,
            key,
            *call.complete,
            norms,
            sums,
            first,
            rows,
            keys,
            *call.counts(),
            call.by_two,
            enable_fp_fusion=False,  # two heads' highest weights are 1 each, and tie, if logits round as for the norms
            **constants,
        )
        columns = max(1, 2048 // blocks)
        chosen_blocks.choose_kernel[ceil_div(rows, columns), call.groups](
            sums,
            *call.complete,
            call.blocks,
            chosen,
            first,
            rows,
            keys,
            call.groups,
            chosen.shape[-1],
            sizes.compress_length // sizes.compress_stride,
            sizes.block_size // sizes.compress_stride,
            sizes.first_blocks,
            sizes.last_blocks,
            R=columns,
            N=blocks,
            num_warps=4,
        )


def _gradients(doutput: Tensor, branches: Tensor, norms: Tensor, chosen: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    found = _gradients_like(doutput, branches, norms, chosen, *arguments)
    dquery, dkey, dvalue, dcompressed_key, dcompressed_value, dwindow_key, dwindow_value, dgates = found
    if not dquery.numel():
        return tuple(map(torch.zeros_like, found))
    call = launches.Call(arguments[:8], arguments[8], arguments[9], Sizes(*arguments[10]))
    doutput, means = doutput.contiguous(), torch.empty_like(norms)
    with torch.cuda.device_of(dquery):
        rows, columns, width = _rows(call)
        mixing.unmix_kernel[ceil_div(rows, columns),](
            doutput, branches, call.gates, dgates, means, rows, width=call.value_width, R=columns, V=width
        )
        upstream = [(doutput, call.gates.select(-1, branch), norms[branch], means[branch]) for branch in range(3)]
        chosen_blocks.chosen_dquery_kernel[call.tokens, call.groups](
            call.query,
            call.key,
            call.value,
            call.begins,
            chosen,
            *upstream[1],
            dquery,
            call.scaling,
            call.by_two,
            *call.counts(),
            chosen.shape[-1],
            call.sizes.block_size,
            **call.of_blocks(launches.CHOSEN_DQUERY),
        )
        _chosen_dkeys(call, chosen, upstream[1], dkey, dvalue)
        for tensors, ranges, given, into in (
            (call.compressed, call.complete, upstream[0], (dcompressed_key, dcompressed_value)),
            (call.window, call.last_keys, upstream[2], (dwindow_key, dwindow_value)),
        ):
            _range_gradients(call, tensors, ranges, given, dquery, into)
    for chosen_too, own, given in ((dkey, dwindow_key, arguments[5]), (dvalue, dwindow_value, arguments[6])):
        if given is None:
            chosen_too.add_(own)
    return found


def _range_gradients(
    call: launches.Call,
    tensors: tuple[Tensor, Tensor],
    ranges: tuple[Tensor, Tensor],
    upstream: tuple[Tensor, ...],
    dquery: Tensor,
    into: tuple[Tensor, Tensor],
) -> None:
    """Add to ``dquery``, and write the gradients of keys and values."""
    keys = tensors[0].shape[:2].numel()
    if not keys:
        return
    factors = call.scaling, call.by_two
    constants = call.of_ranges(launches.DQUERY)
    key_ranges.range_dquery_kernel[ceil_div(call.tokens, constants["M"]), call.heads](
        call.query, *tensors, *ranges, *upstream, dquery, *factors, call.tokens, *call.counts(), **constants
    )
    constants = call.of_ranges(launches.DKEYS)
    tiles = torch.arange(0, keys, constants["N"], dtype=torch.int32, device=dquery.device)
    firsts = torch.searchsorted(ranges[1], tiles, right=True, out_int32=True)
    lasts = torch.searchsorted(ranges[0], tiles + constants["N"], out_int32=True)
    # Of compressed keys there are few tiles, with many queries each: their heads are spread over programs.
    per_group = call.heads // call.groups
    share = min(per_group, SHARE) if tensors is call.compressed else per_group
    parts = ceil_div(per_group, share)
    partial = into if parts == 1 else tuple(x.new_empty(parts, *x.shape, dtype=torch.float32) for x in into)
    key_ranges.range_dkeys_kernel[len(tiles), call.groups, parts](
        call.query,
        *tensors,
        *ranges,
        firsts,
        lasts,
        *upstream,
        *partial,
        *factors,
        share,
        keys,
        *call.counts(),
        **constants,
    )
    for gradient, of_parts in zip(into, partial, strict=True) if parts > 1 else ():
        gradient.copy_(of_parts.sum(0))


def _chosen_dkeys(
    call: launches.Call, chosen: Tensor, upstream: tuple[Tensor, ...], dkey: Tensor, dvalue: Tensor
) -> None:
    size, device, groups = call.sizes.block_size, dkey.device, call.groups
    sequences = len(call.bounds) - 1
    blocks = call.tokens // size + sequences  # at most
    number = torch.arange(blocks + 1, device=device)
    sequence = torch.searchsorted(call.places.first_block, number, right=True) - 1
    begins = (call.bounds[sequence] + (number - call.places.first_block[sequence]) * size).int()
    stops = torch.minimum(begins + size, call.bounds[sequence + 1]).int()
    # The queries of each block, in order: a stable sort of all choices by their block.
    of_sequence = call.places.first_block[call.places.sequence].view(-1, 1, 1)
    flat = chosen.view(call.tokens, groups, -1)
    taken = torch.where(flat < 0, blocks, flat + of_sequence).int().transpose(0, 1).reshape(groups, -1).contiguous()
    ordered, order = taken.sort(dim=1, stable=True)
    takers = (order // flat.shape[-1]).int()
    starts = torch.searchsorted(ordered, number.int().expand(groups, -1).contiguous(), out_int32=True)
    before = torch.zeros_like(starts)
    before[:, 1:] = ((starts.diff(dim=1) + PART - 1) // PART).cumsum(1)
    parts = taken.shape[1] // PART + blocks  # at most
    part = torch.arange(parts, dtype=torch.int32, device=device).expand(groups, -1).contiguous()
    part_blocks = torch.searchsorted(before[:, 1:].contiguous(), part, right=True, out_int32=True)
    partial = dkey.new_empty(parts, groups, size * (call.width + call.value_width), dtype=torch.float32)
    launch = call.fitting(launches.CHOSEN_DKEYS)
    heads = call.heads // groups
    constants = {**call.of_blocks(launches.CHOSEN_DKEYS), "H": heads, "M": max(launch.queries, power_of_two(heads))}
    chosen_blocks.chosen_dkeys_kernel[parts, groups](
        call.query,
        call.key,
        call.value,
        *upstream,
        takers,
        starts,
        before,
        part_blocks,
        begins,
        stops,
        partial,
        call.scaling,
        call.by_two,
        taken.shape[1],
        blocks,
        parts,
        *call.counts(),
        size,
        PART,
        **constants,
    )
    chosen_blocks.add_parts_kernel[blocks, groups](
        partial,
        before,
        begins,
        stops,
        dkey,
        dvalue,
        blocks,
        groups,
        size,
        **{name: constants[name] for name in ("width", "value_width", "N", "D", "E", "SPLIT", "V")},
    )


def _results(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The output, the branches' outputs ``[3, B, T, H, V]``, their norms ``[3, B, T, H]``, and the choice."""
    shape, sizes = (*query.shape[:3], value.shape[3]), Sizes(*others[-1])
    count = min(sizes.block_count, blocks_of(query.shape[1], sizes))
    return (
        query.new_empty(shape),
        query.new_empty(3, *shape),
        query.new_empty(3, *shape[:3], dtype=torch.float32),
        query.new_full((*query.shape[:2], key.shape[2], count), -1, dtype=torch.int32),
    )


def _gradients_like(
    doutput: Tensor, branches: Tensor, norms: Tensor, chosen: Tensor, *inputs: Any
) -> tuple[Tensor, ...]:
    given = (inputs[place - 4 if x is None else place] for place, x in enumerate(inputs[:8]))
    return tuple(x.new_empty(x.shape) for x in given)


native_sparse_forward = operator(
    f"veomni_triton::native_sparse_forward({_INPUTS}) -> (Tensor output, Tensor branches, Tensor norms, Tensor chosen)",
    _forward,
    _results,
)
native_sparse_gradients = operator(
    f"veomni_triton::native_sparse_gradients(Tensor doutput, Tensor branches, Tensor norms, Tensor chosen, {_INPUTS})"
    " -> (Tensor dquery, Tensor dkey, Tensor dvalue, Tensor dcompressed_key, Tensor dcompressed_value, Tensor dwkey,"
    " Tensor dwvalue, Tensor dgates)",
    _gradients,
    _gradients_like,
)
