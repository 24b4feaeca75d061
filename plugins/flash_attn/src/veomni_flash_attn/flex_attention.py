"""attention by torch's FlexAttention: any mask, window, packing, softcap and sinks, compiled into one kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import config as dynamo_config
from torch._functorch import config as functorch_config
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from veomni_core.errors import ConfigError
from veomni_core.kernels import cast_as_autocast
from veomni_flash_attn.packing import packing
from veomni_ops.attention import refuse

_MOST_VARIANTS = 256
# For fewer than 128 queries PyTorch would choose its decoding kernel, which takes over 400 s to compile for float32
# heads of 128 (PyTorch 2.11, Triton 3.6).
_KERNEL_OPTIONS: Any = {"FORCE_USE_FLEX_ATTENTION": True}
# For float32 heads between 128 and 256, PyTorch 2.11 has no tile sizes of their own, and loads in three stages: at 192
# forward needs 278,784 bytes of shared memory, of an H200's 232,448. PyTorch 2.13 loads in one stage at 192 there.
_ONE_STAGE: Any = {**_KERNEL_OPTIONS, "fwd_num_stages": 1}
# A mask_mod: maps indices (batch, head, query, key) to whether the query sees the key.
Keeps = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def standard(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | BlockMask | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of ``query[B, Hq, S, D]``, ``key[B, Hk, L, D]``, ``value[B, Hk, L, Dv]``; D is at least 16.

    Gradients reach query, key, value and sinks, not an additive mask. Under autocast query, key and value are cast to
    its dtype.

    Args:
        attention_mask: The ``BlockMask`` that transformers builds for FlexAttention, which already contains the window
            and the packing that position ids state; or a mask ``[B, 1 or Hq, S, L]``, boolean or additive; or a padding
            mask ``[B, L]``; or None. Without a mask, the first query is at the first key, and a single one at the last.
        s_aux: Sinks, ``[Hq]``.
        cu_seq_lens_q: Boundaries of packed sequences, ``[sequences + 1]``; then ``B`` is 1.

    Returns:
        ``[B, S, Hq, Dv]``, and ``None`` for the attention weights.

    Raises:
        ConfigError: dropout is requested, or a bias or key selection that the contract doesn't have; packed sequences
            have a batch size other than 1, or only one of ``cu_seq_lens_q`` and ``cu_seq_lens_k``.
    """
    if dropout:
        raise ConfigError("flex_attention does not compute dropout; set the model's attention_dropout to 0")
    refuse("flex_attention", others, attention_mask)
    query, key, value = map(cast_as_autocast, (query, key, value))
    if not query.dtype == key.dtype == value.dtype:
        raise ConfigError(f"flex_attention wants one dtype, but got {query.dtype}, {key.dtype} and {value.dtype}")
    bounds = packing(query, cu_seq_lens_q, cu_seq_lens_k)
    causal = module.is_causal if is_causal is None else is_causal
    padding = added = None
    blocks: BlockMask | None
    if isinstance(attention_mask, BlockMask):
        blocks = attention_mask
        if bounds is not None:
            keeps = [attention_mask.mask_mod, _in_sequence(causal, sliding_window, bounds, query, key)]
            batch, heads = attention_mask.shape[:2]
            blocks = _blocks(keeps, batch, heads, query, key)
    else:
        keeps, batch, heads = [], 1, 1
        if attention_mask is None or attention_mask.dim() == 2:
            if bounds is not None:
                keeps.append(_in_sequence(causal, sliding_window, bounds, query, key))
            else:
                first = 0 if attention_mask is None and query.shape[2] > 1 else key.shape[2] - query.shape[2]
                keeps.append(_by_position(causal, sliding_window, query, first))
            if attention_mask is not None:
                padding, batch = attention_mask.bool(), attention_mask.shape[0]
                keeps.append(_unpadded(padding))
        elif attention_mask.dtype == torch.bool:
            batch, heads = attention_mask.shape[:2]
            keeps.append(_chosen(attention_mask))
        else:
            added = attention_mask
        blocks = _blocks(keeps, batch, heads, query, key) if keeps else None
    without_tiles = query.dtype == torch.float32 and 128 < query.shape[-1] < 256
    output, aux = _attend(
        query,
        key,
        value,
        score_mod=_score(softcap, added),
        block_mask=blocks,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
        kernel_options=_ONE_STAGE if without_tiles else _KERNEL_OPTIONS,
        return_aux=AuxRequest(lse=True),
    )
    _allow_second_backward(output)
    output = output.transpose(1, 2)
    if s_aux is not None:
        # A sink adds exp(sink) to the denominator of each row's softmax: multiply by sigmoid(lse - sink).
        sinks = s_aux.float()
        # An infinite sink gives NaN, as in a softmax: zeros would hide that a parameter has overflowed.
        kept = torch.sigmoid(aux.lse.transpose(1, 2) - (sinks + 0.0 * sinks))  # [B, S, Hq]
        output = (output * kept.unsqueeze(-1)).to(output.dtype)
    hides = sliding_window is not None and sliding_window < key.shape[2]
    if padding is not None and (causal or hides):  # zeros for padded queries, as FlashAttention gives
        output = output * padding[:, -output.shape[1] :, None, None]
    return output.contiguous(), None


def _attend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    """Call the compiled ``flex_attention`` in as few ways as there are, since torch compiles it anew for each.

    Whichever of the three want gradients, all do: one kernel computes their gradients together, and those of the
    others are dropped. Their memory order is transformers' or the contiguous one. Autocast is off: they are cast.
    """
    if torch.compiler.is_compiling():
        return flex_attention(query, key, value, **options)
    heads = [_laid_out(each) for each in (query, key, value)]
    wanting = [each for each in heads if each.requires_grad] if torch.is_grad_enabled() else []
    if wanting:
        heads = [each if each.requires_grad else _WantsAsWell.apply(each, wanting[0]) for each in heads]
    else:
        heads = [each.detach() for each in heads]
    with torch.set_grad_enabled(bool(wanting)), _without_autocast(query.device):
        return _compiled(flex_attention)(*heads, **options)


class _WantsAsWell(torch.autograd.Function):
    """A frozen tensor that wants a gradient, as another one does. Its gradient is dropped."""

    @staticmethod
    def forward(ctx: Any, frozen: Tensor, wanting: Tensor) -> Tensor:
        return frozen.view_as(frozen)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        return None, None


def _laid_out(heads: Tensor) -> Tensor:
    """``heads[B, H, S, D]`` as transformers' transposed projections lie in memory, or else contiguous."""
    _, count, length, width = heads.shape
    orders = ((count * length * width, length * width, width, 1), (length * count * width, width, count * width, 1))
    return heads if heads.stride() in orders else heads.clone(memory_format=torch.contiguous_format)


def _without_autocast(device: torch.device) -> torch.autocast:
    """Autocast that is off. Its dtype is always the same, since torch compiles anew for another one."""
    return torch.autocast(device.type, torch.bfloat16, enabled=False)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` compiled, once per process; within a graph that is being compiled, it is traced instead.

    torch recompiles it for every kind of mask and for new sizes. After eight recompilations torch would by default run
    ``function`` eagerly, which materialises every (query, key) pair. With ``fullgraph`` it raises instead, and we set
    the limit to ``_MOST_VARIANTS``.
    """
    compiled = torch.compile(function, fullgraph=True)

    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        # A second softcap would be traced as a variable, which flex_attention (2.11) can't take: each is a constant.
        constants = dynamo_config.patch(recompile_limit=_MOST_VARIANTS, specialize_float=True)
        # With donated buffers, backward frees saved tensors, and a second backward over the same graph fails.
        with constants, functorch_config.patch(donated_buffer=False):
            return compiled(*args, **kwargs)

    return call


def _allow_second_backward(output: Tensor) -> None:
    """Let the compiled graph of ``output``, which has no donated buffers, run backward with ``retain_graph=True``.

    Compiled with ``donated_buffer=False``, a graph keeps ``None`` instead of an empty list of donated buffers, and
    PyTorch (2.11, 2.13) then raises as if there were some.
    """
    graph = getattr(getattr(output.grad_fn, "_forward_cls", None), "metadata", None)
    if graph is not None and getattr(graph, "bw_donated_idxs", ()) is None:
        graph.bw_donated_idxs = []


def _blocks(keeps: list[Keeps], batch: int, heads: int, query: Tensor, key: Tensor) -> BlockMask:
    """The ``BlockMask`` of all ``keeps`` together.

    ``batch`` and ``heads`` are 1 unless the mask differs by sequence or head. Compiled: the eager function materialises
    an int64 index per (query, key) pair.
    """

    def kept(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        result = keeps[0](batch, head, q, k)
        for each in keeps[1:]:
            result = result & each(batch, head, q, k)
        return result

    make = _compiled(create_block_mask)
    if torch.compiler.is_compiling():
        return make(kept, batch, heads, query.shape[2], key.shape[2], device=query.device)
    with torch.no_grad(), _without_autocast(query.device):
        return make(kept, batch, heads, query.shape[2], key.shape[2], device=query.device)


def _by_position(causal: bool, window: int | None, query: Tensor, first: int) -> Keeps:
    """Causality and window by position; the first query has the position of the key ``first``."""
    # A tensor: Inductor (2.13) doesn't accept a number computed from dynamic sizes here.
    standing = torch.arange(first, first + query.shape[2], device=query.device)
    return lambda batch, head, q, k: _reaches(standing[q] - k, causal, window)


def _in_sequence(causal: bool, window: int | None, bounds: tuple[Tensor, Tensor], query: Tensor, key: Tensor) -> Keeps:
    """Attention within each packed sequence; a sequence's last query has the position of its last key."""
    (of_query, query_left), (of_key, key_left) = (
        _numbered(each.long(), heads.shape[2]) for each, heads in zip(bounds, (query, key), strict=True)
    )

    def keeps(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (of_query[q] == of_key[k]) & _reaches(key_left[k] - query_left[q], causal, window)

    return keeps


def _reaches(behind: Tensor, causal: bool, window: int | None) -> Tensor:
    """Whether a query sees a key that is ``behind`` positions before it."""
    kept = behind >= 0 if causal else behind == behind
    return kept if window is None else kept & (behind.abs() < window)


def _numbered(bounds: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """For each position: the index of its sequence, and the number of positions from it to the sequence's end."""
    positions = torch.arange(length, device=bounds.device)
    # Uses all of `bounds`: Inductor 2.11 doesn't accept a slice of it here.
    numbers = torch.bucketize(positions, bounds, right=True) - 1
    return numbers, bounds[numbers + 1] - positions


def _unpadded(padding: Tensor) -> Keeps:
    return lambda batch, head, q, k: padding[batch, k]


def _chosen(mask: Tensor) -> Keeps:
    shared = mask.shape[1] == 1
    return lambda batch, head, q, k: mask[batch, 0 if shared else head, q, k]


def _score(softcap: float | None, added: Tensor | None) -> Callable[..., Tensor] | None:
    if softcap is None and added is None:
        return None

    def score(value: Tensor, batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if softcap is not None:
            value = softcap * torch.tanh(value / softcap)
        if added is not None:
            value = value + added[batch, 0 if added.shape[1] == 1 else head, q, k]
        return value

    return score
