"""attention's operators: forward and gradients, and what their launches share.

Shape suffixes: ``B`` batch, ``H`` heads, ``K`` key heads, ``S`` queries, ``L`` keys, ``D`` and ``V`` widths.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from operator import mul
from typing import Any

import torch
from torch import Tensor

from veomni_ops.sizes import ceil_div
from veomni_ops.torch_operators import operator
from veomni_triton.attention.forward import forward_kernel
from veomni_triton.attention.gradients import dkeys_kernel, dquery_kernel
from veomni_triton.attention.rows import ranges_kernel, seeing_kernel
from veomni_triton.attention_launches import SMALL, Launch, constants_of, takes_small

_INPUTS = "Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? sinks, float scale, float softcap"
# By the widest head; 64 and 128 are the fastest on an H200 (triton_attention.py --tune in benchmarks/attention).
# All calls of a width have the same, since other tiles may add in another order.
FORWARD = {64: Launch(128, 64, 4, 3), 128: Launch(128, 64, 8, 3), 256: Launch(64, 64, 8, 2)}
DQUERY = {64: Launch(128, 64, 4, 2), 128: Launch(128, 64, 8, 3), 256: Launch(32, 32, 4, 2)}
DKEYS = {64: Launch(64, 64, 4, 3), 128: Launch(64, 64, 4, 2), 256: Launch(32, 32, 4, 2)}
_KEYS = 1024  # of a mask's row at a time
_ROWS = 1024  # whose ranges are compared with a tile of keys at a time


class _Call:
    """What the launches of a call share."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        sinks: Tensor | None,
        scale: float,
        softcap: float,
    ) -> None:
        self.query, self.key, self.value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
        self.batch, self.heads, self.queries, _ = query.shape
        self.groups, self.keys = key.shape[1:3]
        self.mask, self.sinks = mask, sinks
        # Scores are to base 2. A bounded one is softcap * tanh(product * scale / softcap).
        e = 1 / math.log(2)
        softcap = abs(softcap)  # tanh is odd
        self.numbers = (scale / softcap, softcap * e) if softcap else (scale * e, 0.0)
        self.is_rising = softcap > 0 or scale > 0
        self.is_boolean = mask is not None and mask.dtype == torch.bool

    def operands(self) -> tuple[Tensor | None, ...]:
        mask = self.mask.view(torch.uint8) if self.mask is not None and self.is_boolean else self.mask
        return self.query, self.key, self.value, mask

    def sizes(self, ranges: Tensor) -> tuple[int, ...]:
        """The arguments of kernels that are heads and strides."""
        _, batches, heads, queries = ranges.shape
        of_mask = (0,) * 4 if self.mask is None else self.mask.expand(self.batch, self.heads, -1, -1).stride()
        of_ranges = (heads * queries if batches > 1 else 0, queries if heads > 1 else 0, ranges[0].numel())
        strides = (each for x in (self.query, self.key, self.value) for each in x.stride()[:3])
        return self.heads, self.groups, *strides, *of_mask, *of_ranges

    def constants(self, launches: Mapping[int, Launch]) -> dict[str, Any]:
        """What kernels are compiled for."""
        widest = max(self.query.shape[-1], self.value.shape[-1])
        launch = next(each for width, each in launches.items() if widest <= width)
        launch = SMALL if takes_small(self.query) else launch
        return {
            "CAPPED": self.numbers[1] > 0,
            "HALVED": self.mask is not None,
            "BOOLEAN": self.is_boolean,
            "LOSES": self.mask is None or self.mask.dtype != torch.float16,
            "LARGE": self.mask is not None and sum(map(mul, self.mask.shape[1:], self.mask.stride()[1:])) >= 1 << 31,
            "M": launch.queries,
            "N": launch.keys,
            **constants_of(self.query, self.value.shape[-1], launch),
        }

    def launch(
        self, kernel: Any, launches: Mapping[int, Launch], *arguments: Any, tiles: int | None = None, **options: Any
    ) -> None:
        """A kernel of ``tiles``, or of rows': of those that read no mask, and then of the others."""
        constants = self.constants(launches)
        tiles = ceil_div(self.queries * self.heads // self.groups, constants["M"]) if tiles is None else tiles
        for masked in (False, True)[: 1 + constants["HALVED"]]:
            kernel[tiles, self.groups, self.batch](*arguments, MASKED=masked, **constants, **options)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sinks: Tensor | None, *how: Any
) -> tuple[Tensor, Tensor, Tensor]:
    call, visible = _Call(query, key, value, mask, sinks, *how[:2]), how[2:]
    output, norms, ranges = _results(query, key, value, mask, sinks, *how)
    with torch.cuda.device_of(query):
        if mask is None:
            ranges[:2, 0, 0] = _ranges(call, *visible)
            ranges[2:] = 0
        elif ranges.numel():
            _, batches, heads, _ = ranges.shape
            ranges_kernel[call.queries, heads, batches](
                call.operands()[3],
                ranges,
                0.0 if call.is_boolean else torch.finfo(mask.dtype).min / 2,
                heads,
                call.queries,
                call.keys,
                *mask.stride(),
                BOOLEAN=call.is_boolean,
                SINKS=sinks is not None,
                N=_KEYS,
            )
        if output.numel():
            call.launch(
                forward_kernel,
                FORWARD,
                *call.operands(),
                ranges,
                sinks,
                output,
                norms,
                *call.numbers,
                call.queries,
                *call.sizes(ranges),
                RISING=call.is_rising,
                enable_fp_fusion=False,  # what is compiled with a mask and without one must round alike
            )
    return output, norms, ranges


def _ranges(
    call: _Call, causal: bool, window: int | None, query_bounds: Tensor | None, key_bounds: Tensor | None
) -> Tensor:
    """The keys from and to which each query sees without a mask ``[2, S]``, as ``veomni_ops.attention.visible``."""
    place = torch.arange(call.queries, device=call.query.device)
    of_queries, of_keys = (
        place.new_tensor([0, length]) if bounds is None else bounds.long()
        for length, bounds in ((call.queries, query_bounds), (call.keys, key_bounds))
    )
    sequence = torch.bucketize(place, of_queries[1:], right=True)
    begin, stop = of_keys[sequence], of_keys[sequence + 1]
    if query_bounds is not None or call.queries == 1:  # else a query's own key is as far from the first one as it is
        place = place + stop - of_queries[sequence + 1]
    if window is not None:
        begin, stop = torch.maximum(begin, place - window + 1), torch.minimum(stop, place + window)
    if causal:
        stop = torch.minimum(stop, place + 1)
    return torch.stack((begin, torch.where(begin < stop, stop, 0)))


def _seeing(ranges: Tensor, call: _Call) -> Tensor:
    """What :func:`seeing_kernel` finds for each tile of keys ``[5, Bm, tiles]``."""
    _, batches, heads, queries = ranges.shape
    constants = call.constants(DKEYS)
    tile, block = constants["N"], constants["M"]
    seeing = ranges.new_empty(5, batches, ceil_div(call.keys, tile))
    seeing_kernel[seeing.shape[2], batches](
        ranges, seeing, heads, queries, ranges[0].numel(), N=tile, Q=block, R=_ROWS // block
    )
    return seeing


def _gradients(
    doutput: Tensor, output: Tensor, norms: Tensor, ranges: Tensor, *inputs: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    call, scale = _Call(*inputs), inputs[5]
    sinks = call.sinks
    (batch, heads, queries, width), (groups, keys) = call.query.shape, call.key.shape[1:3]
    dquery = call.query.new_empty(batch, queries, heads, width)
    dkey, dvalue = (x.new_empty(batch, keys, groups, x.shape[-1]) for x in (call.key, call.value))
    means = torch.zeros_like(norms)
    if not output.numel():
        for gradient in (dquery, dkey, dvalue):
            gradient.zero_()
    else:
        doutput = doutput.contiguous()
        shared = (*call.numbers, scale)
        with torch.cuda.device_of(call.query):
            call.launch(
                dquery_kernel,
                DQUERY,
                *call.operands(),
                ranges,
                output,
                doutput,
                norms,
                means,
                dquery,
                *shared,
                queries,
                *call.sizes(ranges),
            )
            seeing = _seeing(ranges, call)
            call.launch(
                dkeys_kernel,
                DKEYS,
                *call.operands(),
                ranges,
                seeing,
                doutput,
                norms,
                means,
                dkey,
                dvalue,
                *shared,
                queries,
                keys,
                *call.sizes(ranges),
                seeing.shape[2] if seeing.shape[1] > 1 else 0,
                seeing[0].numel(),
                tiles=seeing.shape[2],
            )
    if sinks is None:
        dsinks = norms.new_empty(0)
    else:
        weights = torch.exp2(sinks.float() / math.log(2) - norms)
        dsinks = -(weights * means).sum((0, 1)).to(sinks.dtype)
    return dquery.transpose(1, 2), dkey.transpose(1, 2), dvalue.transpose(1, 2), dsinks


def _results(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, queries, _width = query.shape
    of_mask = (1, 1) if mask is None else mask.shape[:2]
    return (
        query.new_empty(batch, queries, heads, value.shape[-1]),
        query.new_empty(batch, queries, heads, dtype=torch.float32),
        query.new_empty(4, *of_mask, queries, dtype=torch.int32),
    )


def _gradients_like(
    doutput: Tensor, output: Tensor, norms: Tensor, ranges: Tensor, query: Tensor, *inputs: Any
) -> tuple[Tensor, ...]:
    key, value, _, sinks = inputs[:4]
    of_heads = (x.new_empty(x.transpose(1, 2).shape).transpose(1, 2) for x in (query, key, value))
    return *of_heads, norms.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)


attention_forward = operator(
    f"veomni_triton::attention_forward({_INPUTS}, bool causal, int? window, Tensor? query_bounds, Tensor? key_bounds)"
    " -> (Tensor output, Tensor norms, Tensor ranges)",
    _forward,
    _results,
)
attention_gradients = operator(
    f"veomni_triton::attention_gradients(Tensor doutput, Tensor output, Tensor norms, Tensor ranges, {_INPUTS}) -> "
    "(Tensor dquery, Tensor dkey, Tensor dvalue, Tensor dsinks)",
    _gradients,
    _gradients_like,
)
