"""npu_fusion_attention: ``softmax(mask(scale * (pse + query @ key.T))) @ value``, in five layouts, with dropout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from npu_sim.operators.attention_layouts import Layout, read_layout
from npu_sim.operators.attention_masks import hidden
from npu_sim.operators.limits import require, require_dtype, require_same_dtype

NAME = "npu_fusion_attention"
SCHEMAS = {
    "npu_fusion_attention": (
        "(Tensor query, Tensor key, Tensor value, int head_num, str input_layout, Tensor? pse=None, "
        "Tensor? padding_mask=None, Tensor? atten_mask=None, float scale=1., float keep_prob=1., "
        "int pre_tockens=2147483647, int next_tockens=2147483647, int inner_precise=0, int[]? prefix=None, "
        "int[]? actual_seq_qlen=None, int[]? actual_seq_kvlen=None, int sparse_mode=0, "
        'bool gen_mask_parallel=True, bool sync=False, str softmax_layout="", Tensor? sink=None, '
        "Tensor? dropout_mask=None, int seed=0, int offset=0) -> (Tensor, Tensor, Tensor, Tensor, int, int, int)"
    ),
    "npu_fusion_attention_grad": (
        "(Tensor query, Tensor key, Tensor value, Tensor dy, int head_num, str input_layout, *, Tensor? pse=None, "
        "Tensor? padding_mask=None, Tensor? atten_mask=None, Tensor? softmax_max=None, Tensor? softmax_sum=None, "
        "Tensor? softmax_in=None, Tensor? attention_in=None, float scale_value=1., float keep_prob=1., "
        "int pre_tockens=2147483647, int next_tockens=2147483647, int inner_precise=0, int seed=0, int offset=0, "
        "int numels=0, int[]? prefix=None, int[]? actual_seq_qlen=None, int[]? actual_seq_kvlen=None, "
        'int sparse_mode=0, bool gen_mask_parallel=True, bool sync=False, str softmax_layout="", '
        "Tensor? sink=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
}

_ARGUMENTS = tuple(argument.name for argument in torch._C.parse_schema(NAME + SCHEMAS[NAME]).arguments)
_OPTIONAL = _ARGUMENTS[_ARGUMENTS.index("pse") :]
LANES = 8  # softmax_max and softmax_sum repeat every number this often


def npu_fusion_attention(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, *optional: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    """The attention in the layout and dtype of ``query``; the softmax's maxima and sums in float32; an unused tensor.

    Maxima and sums are [B, N, Sq, 8], or [T, N, 8] where sequences are packed. The integers belong to dropout: a seed,
    an offset and a count.
    """
    options = dict(zip(_OPTIONAL, optional, strict=False))
    options["seed"] = seed = int(torch.randint(2**31, ())) if options.get("keep_prob", 1.0) < 1 else 0
    call = _Call(query, key, value, head_num, input_layout, options, options.get("scale", 1.0))
    outputs, maxima, sums = zip(*(call.attend(block) for block in range(call.count)), strict=True)
    statistics = [_statistics(call.layout, list(blocks)) for blocks in (maxima, sums)]
    return call.layout.join([block.to(query.dtype) for block in outputs]), *statistics, query.new_empty(0), seed, 0, 0


def npu_fusion_attention_grad(
    query: Tensor, key: Tensor, value: Tensor, dy: Tensor, head_num: int, input_layout: str, **options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """The gradients of query, key and value; None and an empty tensor for ``pse`` and ``sink``.

    Like the library's, it needs the forward's maxima, sums and result; it recomputes the probabilities from them.
    """
    call = _Call(query, key, value, head_num, input_layout, options, options.get("scale_value", 1.0))
    saved = [options.get(name) for name in ("softmax_max", "softmax_sum", "attention_in")]
    require(all(tensor is not None for tensor in saved), f"{NAME}_grad needs softmax_max, softmax_sum and attention_in")
    gradients = zip(*(call.gradients(block, dy, *saved) for block in range(call.count)), strict=True)
    joined = [call.layout.join([block.to(query.dtype) for block in blocks]) for blocks in gradients]
    return *joined, None, torch.empty(0)


class _Call:
    """The blocks of one call in float32, with the heads of keys and values repeated for their groups."""

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, heads: int, layout: str, options: dict[str, Any], scale: float
    ) -> None:
        require_dtype(NAME, "query", query)
        require_same_dtype(NAME, query=query, key=key, value=value)
        for name in ("padding_mask", "prefix", "sink", "dropout_mask"):
            require(options.get(name) is None, f"{NAME}: {name} is not simulated")
        ends = (options.get("actual_seq_qlen") or [], options.get("actual_seq_kvlen") or [])
        self.layout, self.key_heads = read_layout(query, key, value, heads, layout, *ends)
        self.scale, self.options, self.pse = scale, options, options.get("pse")
        self.queries = [block.float() for block in self.layout.blocks_of_queries(query)]
        self.keys, self.values = (
            [block.float() for block in self.layout.blocks_of_keys(tensor, self.key_heads)] for tensor in (key, value)
        )
        self.count = len(self.queries)
        self.group = heads // self.key_heads
        self._require_pse_limits(query)

    def _require_pse_limits(self, query: Tensor) -> None:
        if self.pse is None:
            return
        require_same_dtype(NAME, query=query, pse=self.pse)
        require(self.layout.name != "TND", f"{NAME}: pse is not simulated for packed sequences")
        (batch, heads, queries, _), keys = self.queries[0].shape, self.keys[0].shape[2]
        allowed = [(batch, heads, queries, keys), (batch, heads, 1, keys), (1, heads, queries, keys)]
        require(
            tuple(self.pse.shape) in allowed,
            f"{NAME}: pse must have one of the shapes {allowed}, but got {tuple(self.pse.shape)}",
        )

    def attend(self, block: int) -> tuple[Tensor, Tensor, Tensor]:
        scores = self._scores(block)
        maxima = scores.amax(-1, keepdim=True)
        weights = (scores - maxima).exp()
        sums = weights.sum(-1, keepdim=True)
        return (weights / sums * self._kept(block, weights)) @ self._repeated(self.values[block]), maxima, sums

    def gradients(
        self, block: int, dy: Tensor, softmax_max: Tensor, softmax_sum: Tensor, attention_in: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        upstream, attention = (self.layout.blocks_of_queries(tensor)[block].float() for tensor in (dy, attention_in))
        maxima, sums = (_block_of_statistics(self.layout, tensor, block) for tensor in (softmax_max, softmax_sum))
        weights = (self._scores(block) - maxima).exp() / sums
        key, value = self._repeated(self.keys[block]), self._repeated(self.values[block])
        kept = self._kept(block, weights)
        dweights = upstream @ value.transpose(-1, -2) * kept
        dscores = weights * (dweights - (upstream * attention).sum(-1, keepdim=True)) * self.scale
        dkey = dscores.transpose(-1, -2) @ self.queries[block]
        return dscores @ key, self._summed(dkey), self._summed((weights * kept).transpose(-1, -2) @ upstream)

    def _scores(self, block: int) -> Tensor:
        scores = self.queries[block] @ self._repeated(self.keys[block]).transpose(-1, -2)
        scores = (scores if self.pse is None else scores + self.pse) * self.scale
        ranges = (self.options.get(name, 2147483647) for name in ("pre_tockens", "next_tockens"))
        mask = hidden(self.options.get("atten_mask"), self.options.get("sparse_mode", 0), *ranges, scores)
        return scores if mask is None else scores.masked_fill(mask, torch.finfo(torch.float32).min)

    def _kept(self, block: int, weights: Tensor) -> Tensor:
        """What the weights of a block are multiplied by: 0 where they are dropped, ``1 / keep_prob`` elsewhere."""
        keep = self.options.get("keep_prob", 1.0)
        generator = torch.Generator().manual_seed(self.options.get("seed", 0) + block)
        return torch.rand(weights.shape, generator=generator).lt(keep).float().to(weights.device) / keep

    def _repeated(self, tensor: Tensor) -> Tensor:
        return tensor.repeat_interleave(self.group, dim=1)

    def _summed(self, gradient: Tensor) -> Tensor:
        return gradient.unflatten(1, (-1, self.group)).sum(2)


def _statistics(layout: Layout, blocks: list[Tensor]) -> Tensor:
    """Numbers per query [B, N, Sq, 1] as the library gives them."""
    repeated = [block.expand(*block.shape[:-1], LANES) for block in blocks]
    return layout.join(repeated) if layout.name == "TND" else repeated[0].contiguous()


def _block_of_statistics(layout: Layout, statistics: Tensor, block: int) -> Tensor:
    blocks = layout.blocks_of_queries(statistics) if layout.name == "TND" else [statistics]
    return blocks[block][..., :1]


KERNELS = {"npu_fusion_attention": npu_fusion_attention, "npu_fusion_attention_grad": npu_fusion_attention_grad}
META: dict[str, Any] = {}  # the documentation: not for graphs

_FORWARD_ONLY = ("scale", "dropout_mask")


def _save(ctx, inputs, output) -> None:
    ctx.options = dict(zip(_ARGUMENTS, inputs, strict=True))
    ctx.options["seed"] = output[4]
    tensors = [ctx.options.pop(name) for name in ("query", "key", "value")]
    ctx.save_for_backward(*tensors, ctx.options.pop("atten_mask"), ctx.options.pop("pse"), *output[:3])
    ctx.mark_non_differentiable(*output[1:4])


def _gradients(ctx, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    query, key, value, atten_mask, pse, attention, softmax_max, softmax_sum = ctx.saved_tensors
    options = {name: value for name, value in ctx.options.items() if name not in _FORWARD_ONLY}
    heads, layout = options.pop("head_num"), options.pop("input_layout")
    found = torch.ops.npu.npu_fusion_attention_grad(
        query, key, value, dy, heads, layout, pse=pse, atten_mask=atten_mask, softmax_max=softmax_max,
        softmax_sum=softmax_sum, attention_in=attention, scale_value=ctx.options["scale"], **options,
    )  # fmt: skip
    return *found[:3], *(None for _ in _ARGUMENTS[3:])


AUTOGRAD = {"npu_fusion_attention": (_save, _gradients)}
