"""attention in Triton whose bits don't depend on the batch: prefill, padded, packed and token by token give the same.

A mask is first read once, for the keys from and to which each query sees some. Where it hides none of those and adds
nothing, as causal, padded, packed and windowed ones do, no other kernel reads it. Forward saves its inputs, the output,
a number for each row, and these ranges. Nothing is added by atomics, and nothing is read on the host.

Shape suffixes: ``B`` batch, ``H`` heads, ``K`` key heads, ``S`` queries, ``L`` keys, ``D`` and ``V`` widths.
"""

from __future__ import annotations

import math
from operator import mul
from typing import Any

import torch
from torch import Tensor, library
from torch.autograd import Function
from torch.nn import functional as F

from veomni_core.errors import ConfigError
from veomni_core.kernels import first_derivatives_only, product_operands, without_autocast
from veomni_ops.attention import refuse
from veomni_triton.attention import kernels
from veomni_triton.attention_launches import SMALL, Launch, constants_of, takes_small
from veomni_triton.sizes import ceil_div

_NAMESPACE = "veomni_triton"
_LIBRARY = library.Library(_NAMESPACE, "FRAGMENT")
_INPUTS = "Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? sinks, float scale, float softcap"
_LIBRARY.define(
    f"attention_forward({_INPUTS}, bool causal, int? window, Tensor? query_bounds, Tensor? key_bounds) -> "
    "(Tensor output, Tensor norms, Tensor ranges)"
)
_LIBRARY.define(
    f"attention_gradients(Tensor doutput, Tensor output, Tensor norms, Tensor ranges, {_INPUTS}) -> "
    "(Tensor dquery, Tensor dkey, Tensor dvalue, Tensor dsinks)"
)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MASKS = (torch.bool, *_DTYPES)
_WIDEST = 256
# Not timed yet. All calls of a width have the same, since other tiles may add in another order.
FORWARD, DQUERY, DKEYS = Launch(128, 64, 8, 3), Launch(64, 64, 4, 2), Launch(32, 64, 4, 2)
WIDE_FORWARD, WIDE_BACKWARD = Launch(64, 64, 8, 2), Launch(32, 32, 4, 2)  # of heads above 128
_KEYS = 1024  # of a mask's row at a time
_QUERIES = 64  # that are counted as one where those that see a key are looked for


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """``softmax(scaling * query @ key.T + mask) @ value``, as ``[B, S, H, V]``, and ``None`` for the weights.

    Gradients reach query, key, value and sinks. Without a mask, causal attention is aligned at the first key, and a
    single query sees all keys.

    Args:
        query, key, value: ``[B, H, S, D]``, ``[B, K, L, D]``, ``[B, K, L, V]``.
        attention_mask: ``[1 or B, 1 or H, S, L]``, boolean or added. It holds window and boundaries, where it is given.
        s_aux: a score per head ``[H]``, whose weight is dropped.

    Raises:
        ConfigError: dropout, heads above 256, a mask of other than 4 dimensions, of integers or float64, or with a
            gradient, or sinks per query are given.
        TypeError: query, key and value differ in dtype without autocast, or are of none of float32, bfloat16 and
            float16.
    """
    refuse("triton", options, attention_mask)
    mask = attention_mask
    refused = {
        "dropout": dropout > 0,
        f"heads above {_WIDEST}": max(query.shape[-1], value.shape[-1]) > _WIDEST,
        "a mask of other than 4 dimensions": mask is not None and mask.dim() != 4,
        "a mask of integers or float64": mask is not None and mask.dtype not in _MASKS,
        "the gradient of a mask": mask is not None and mask.requires_grad,
    }
    if any(refused.values()):
        asked = " and ".join(what for what, is_asked in refused.items() if is_asked)
        raise ConfigError(f"triton does not compute {asked}; choose eager or sdpa (attn_implementation)")
    query, key, value = product_operands("triton", dtypes=_DTYPES, query=query, key=key, value=value)
    mask = mask if mask is None else mask[..., : key.shape[2]].expand(-1, -1, query.shape[2], key.shape[2])
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    how = (scale, softcap or 0.0, causal, sliding_window, cu_seq_lens_q, cu_seq_lens_k)
    sinks = None if s_aux is None else s_aux.contiguous()  # kernels read it without a stride
    return _Attention.apply(query, key, value, mask, sinks, *how)[0], None


class _Attention(Function):
    @staticmethod
    @without_autocast
    def forward(ctx: Any, *call: Any) -> tuple[Tensor, ...]:
        output, *saved = torch.ops.veomni_triton.attention_forward.default(*call)
        ctx.save_for_backward(output, *saved, *call[:5])
        ctx.settings = call[5:7]
        ctx.mark_non_differentiable(*saved)
        return output, *saved

    @staticmethod
    @first_derivatives_only
    @without_autocast
    def backward(ctx: Any, doutput: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        *found, dsinks = torch.ops.veomni_triton.attention_gradients.default(doutput, *ctx.saved_tensors, *ctx.settings)
        wanted = zip((*found, None, dsinks), ctx.needs_input_grad, strict=False)
        return *(x if needed else None for x, needed in wanted), *(None,) * 6


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
        self.numbers = (scale / softcap, softcap * e) if softcap else (scale * e, 0.0)
        self.is_boolean = mask is not None and mask.dtype == torch.bool
        self.half = 0.0 if mask is None or self.is_boolean else torch.finfo(mask.dtype).min / 2

    def operands(self) -> tuple[Tensor | None, ...]:
        mask = self.mask.view(torch.uint8) if self.mask is not None and self.is_boolean else self.mask
        return self.query, self.key, self.value, mask

    def sizes(self, ranges: Tensor) -> tuple[int, ...]:
        """The arguments of kernels that are heads, widths and strides."""
        _, batches, heads, queries = ranges.shape
        of_mask = (0,) * 4 if self.mask is None else self.mask.expand(self.batch, self.heads, -1, -1).stride()
        of_ranges = (heads * queries if batches > 1 else 0, queries if heads > 1 else 0, ranges[0].numel())
        strides = (each for x in (self.query, self.key, self.value) for each in x.stride()[:3])
        return self.heads, self.groups, self.query.shape[-1], self.value.shape[-1], *strides, *of_mask, *of_ranges

    def constants(self, launch: Launch, wide: Launch) -> dict[str, Any]:
        """What kernels are compiled for."""
        launch = wide if max(self.query.shape[-1], self.value.shape[-1]) > 128 else launch
        launch = SMALL if takes_small(self.query) else launch
        return {
            "CAPPED": self.numbers[1] > 0,
            "MASKED": self.mask is not None,
            "BOOLEAN": self.is_boolean,
            "LOSES": self.mask is None or self.mask.dtype != torch.float16,
            "LARGE": self.mask is not None and sum(map(mul, self.mask.shape[1:], self.mask.stride()[1:])) >= 1 << 31,
            "M": launch.queries,
            "N": launch.keys,
            **constants_of(self.query, self.value.shape[-1], launch),
        }

    def launch(self, kernel: Any, launch: Launch, wide: Launch, *arguments: Any, **options: Any) -> None:
        """A kernel of tiles of rows: those that read no mask, and then the others."""
        constants = self.constants(launch, wide)
        grid = ceil_div(self.queries * self.heads // self.groups, constants["M"]), self.groups, self.batch
        for masked in (False,) if self.mask is None else (False, True):
            kernel[grid](*arguments, **constants | {"MASKED": masked}, HALVED=self.mask is not None, **options)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sinks: Tensor | None, *how: Any
) -> tuple[Tensor, Tensor, Tensor]:
    call, visible = _Call(query, key, value, mask, sinks, *how[:2]), how[2:]
    output, norms, ranges = _results(query, key, value, mask, sinks, *how)
    with torch.cuda.device_of(query):
        if mask is None:
            ranges[:2, 0, 0] = _ranges(call, *visible)
            ranges[2] = 0
        elif ranges.numel():
            _, batches, heads, _ = ranges.shape
            kernels.ranges_kernel[call.queries, heads, batches](
                call.operands()[3],
                ranges,
                call.half,
                heads,
                call.queries,
                call.keys,
                *mask.stride(),
                BOOLEAN=call.is_boolean,
                N=_KEYS,
            )
        if output.numel():
            call.launch(
                kernels.forward_kernel,
                FORWARD,
                WIDE_FORWARD,
                *call.operands(),
                ranges,
                sinks,
                output,
                norms,
                call.half,
                *call.numbers,
                call.queries,
                *call.sizes(ranges),
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
        dkey.zero_(), dvalue.zero_(), dquery.zero_()
    else:
        doutput = doutput.contiguous()
        shared = (call.half, *call.numbers, scale)
        with torch.cuda.device_of(call.query):
            call.launch(
                kernels.dquery_kernel,
                DQUERY,
                WIDE_BACKWARD,
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
            constants = call.constants(DKEYS, WIDE_BACKWARD)
            seeing = _seeing(ranges, keys, constants["N"])
            kernels.dkeys_kernel[seeing.shape[2], groups, batch](
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
                **constants,
            )
    if sinks is None:
        dsinks = norms.new_empty(0)
    else:
        weights = torch.exp2(sinks.float() / math.log(2) - norms)
        dsinks = -(weights * means).sum((0, 1)).to(sinks.dtype)
    return dquery.transpose(1, 2), dkey.transpose(1, 2), dvalue.transpose(1, 2), dsinks


def _seeing(ranges: Tensor, keys: int, tile: int) -> Tensor:
    """For each tile of keys the queries from and to which some see it, ``[2, Bm, tiles]``, by :data:`_QUERIES`."""
    begins, stops, _ = ranges
    queries, missing = ranges.shape[-1], -ranges.shape[-1] % _QUERIES
    begin = F.pad(torch.where(begins < stops, begins, keys).amin(1), (0, missing), value=keys)
    begin, stop = (x.unflatten(1, (-1, _QUERIES)) for x in (begin, F.pad(stops.amax(1), (0, missing))))
    first_key = torch.arange(0, keys, tile, device=ranges.device)
    sees = (begin.amin(2)[..., None] < first_key + tile) & (stop.amax(2)[..., None] > first_key)  # [Bm, blocks, tiles]
    block = torch.arange(sees.shape[1], device=ranges.device)[:, None] * _QUERIES
    first = torch.where(sees, block, queries).amin(1)
    return torch.stack((first, torch.where(sees, block + _QUERIES, 0).amax(1).clamp_max(queries))).int()


def _results(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, queries, _width = query.shape
    of_mask = (1, 1) if mask is None else mask.shape[:2]
    return (
        query.new_empty(batch, queries, heads, value.shape[-1]),
        query.new_empty(batch, queries, heads, dtype=torch.float32),
        query.new_empty(3, *of_mask, queries, dtype=torch.int32),
    )


def _gradients_like(
    doutput: Tensor, output: Tensor, norms: Tensor, ranges: Tensor, query: Tensor, *inputs: Any
) -> tuple[Tensor, ...]:
    key, value, _, sinks = inputs[:4]
    of_heads = (x.new_empty(x.transpose(1, 2).shape).transpose(1, 2) for x in (query, key, value))
    return *of_heads, norms.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)


for _name, _implementation, _fake in (
    ("attention_forward", _forward, _results),
    ("attention_gradients", _gradients, _gradients_like),
):
    _LIBRARY.impl(_name, _implementation, "CompositeExplicitAutograd")
    library.register_fake(f"{_NAMESPACE}::{_name}", _fake, lib=_LIBRARY)
