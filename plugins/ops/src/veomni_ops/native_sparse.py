"""native_sparse: attention's variant of Native Sparse Attention (arXiv 2502.11089), of three branches mixed by gates.

A query attends to compressed keys, each of which a model makes of some tokens; to the keys of a few blocks, chosen by
its attention to the compressed ones; and to the last keys. The model brings compressed keys and gates, of its own
modules. Positions, blocks and compressed keys are counted from the begin of each sequence.

Shape suffixes: ``B`` batch, ``T`` tokens, ``H`` query heads, ``G`` key heads, ``D`` width of keys, ``V`` of values,
``C`` compressed keys, ``K`` chosen blocks; flat over the batch ``N`` tokens and ``M`` compressed keys.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from veomni_core.kernels import cast_as_autocast
from veomni_ops.contract import compute_dtype


@dataclass(frozen=True)
class Sizes:
    """How much of a sequence each branch sees; the paper's by default.

    Attributes:
        compress_length: tokens of which a compressed key is made.
        compress_stride: tokens from one compressed key's first to the next one's; divides the other two.
        block_size: tokens of a block that is chosen as a whole.
        block_count: blocks that a query chooses.
        first_blocks: of them, those at the begin of the sequence that it always has.
        last_blocks: of them, those up to its own that it always has.
        window: the last tokens that it sees, its own included.

    Raises:
        ValueError: a size is below 1 or doesn't fit to another.

    Example:
        >>> Sizes(block_count=2)
        Traceback (most recent call last):
            ...
        ValueError: native_sparse: block_count is 2; give at least first_blocks + last_blocks, which is 3
    """

    compress_length: int = 32
    compress_stride: int = 16
    block_size: int = 64
    block_count: int = 16
    first_blocks: int = 1
    last_blocks: int = 2
    window: int = 512

    def __post_init__(self) -> None:
        for each in fields(self):
            least = 0 if each.name in ("first_blocks", "last_blocks") else 1
            if getattr(self, each.name) < least:
                raise ValueError(f"native_sparse: {each.name} is {getattr(self, each.name)}; give {least} or more")
        for name in ("compress_length", "block_size"):
            if (size := getattr(self, name)) % self.compress_stride:
                wanted = f"a multiple of compress_stride, which is {self.compress_stride}"
                raise ValueError(f"native_sparse: {name} is {size}; give {wanted}")
        if self.block_count < self.first_blocks + self.last_blocks:
            wanted = f"at least first_blocks + last_blocks, which is {self.first_blocks + self.last_blocks}"
            raise ValueError(f"native_sparse: block_count is {self.block_count}; give {wanted}")

    def compressed(self, tokens: int) -> int:
        """How many compressed keys a sequence of so many tokens has.

        Example:
            >>> [Sizes().compressed(tokens) for tokens in (31, 32, 47, 48)]
            [0, 1, 1, 2]
        """
        return max(0, (tokens - self.compress_length) // self.compress_stride + 1)

    def overlaps(self) -> list[tuple[int, int]]:
        """How much each compressed key counts for a block: its place from the block's first, and strides of both.

        Example:
            >>> Sizes().overlaps()
            [(-1, 1), (0, 2), (1, 2), (2, 2), (3, 1)]
        """
        long, wide = self.compress_length // self.compress_stride, self.block_size // self.compress_stride
        return [(place, min(place + long, wide) - max(place, 0)) for place in range(1 - long, wide)]


@dataclass(frozen=True)
class Places:
    """Where the tokens of all sequences are, flat over the batch; int64.

    Attributes:
        sequence, begin: of each token ``[N]``, its sequence and the first token of that.
        compressed_begin, compressed_stop: of each token ``[N]``, the compressed keys that are complete.
        block: of each token ``[N]``, its block within the sequence.
        first_block: of each sequence, the number of blocks before it.

    Example:
        >>> Places.of(5, torch.tensor([0, 2, 5]), Sizes(2, 1, 2)).compressed_stop
        tensor([0, 1, 1, 2, 3])
    """

    sequence: Tensor
    begin: Tensor
    compressed_begin: Tensor
    compressed_stop: Tensor
    block: Tensor
    first_block: Tensor

    @staticmethod
    def of(tokens: int, bounds: Tensor, sizes: Sizes) -> Places:
        """The places of ``tokens`` in sequences with these ``bounds``, from 0 to ``tokens``."""
        bounds = bounds.long()
        lengths = bounds.diff()
        counts = _complete(lengths, sizes)
        blocks = (lengths + sizes.block_size - 1) // sizes.block_size
        token = torch.arange(tokens, device=bounds.device)
        sequence = torch.searchsorted(bounds[1:].contiguous(), token, right=True).clamp_max(max(0, len(lengths) - 1))
        begin = bounds[:-1][sequence]
        first = (counts.cumsum(0) - counts)[sequence]
        seen = _complete(token - begin + 1, sizes)
        return Places(
            sequence, begin, first, first + seen, (token - begin) // sizes.block_size, blocks.cumsum(0) - blocks
        )


def _complete(tokens: Tensor, sizes: Sizes) -> Tensor:
    return ((tokens - sizes.compress_length).div(sizes.compress_stride, rounding_mode="floor") + 1).clamp_min(0)


def bounds_of(query: Tensor, cu_seq_lens: Tensor | None) -> Tensor:
    """The bounds of sequences, flat over the batch: those that are given, or of a sequence per batch row.

    Example:
        >>> bounds_of(torch.zeros(2, 3, 1, 1), None)
        tensor([0, 3, 6])
    """
    if cu_seq_lens is not None:
        return cu_seq_lens.long()
    batch, tokens = query.shape[:2]
    return torch.arange(batch + 1, device=query.device) * tokens


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
    """``gates[..., 0] * compressed + gates[..., 1] * selected + gates[..., 2] * window``, each a softmax attention.

    - compressed: over the compressed keys whose last token a query has reached; zeros where there is none.
    - selected: over the keys up to the query of the blocks that :func:`chosen_blocks` gives, the same ones for all
      heads of a key head. No gradient passes through the choice.
    - window: over the last keys.

    Args:
        query: ``[B, T, H, D]``; with rotary embedding, if the model has one.
        key, value: ``[B, T, G, D]`` and ``[B, T, G, V]``, each shared by ``H / G`` heads, in the dtype of ``query``.
        compressed_key, compressed_value: ``[B, C, G, D]`` and ``[B, C, G, V]``: of the tokens from each multiple of
            ``compress_stride`` on, ``compress_length`` of them, as many as are whole; of packed sequences one after the
            other.
        gates: ``[B, T, H, 3]``, of any floating dtype.
        window_key, window_value: of the window alone, as the paper has them; ``key`` and ``value`` without them.
        cu_seq_lens: int32 ``[sequences + 1]``, the bounds of sequences packed in a batch of one.
        scaling: of the logits; ``D ** -0.5`` without it.
        sizes: :class:`Sizes`.

    Returns:
        ``[B, T, H, V]``, in the dtype of ``query``.

    Raises:
        ValueError: shapes, dtypes or sizes don't fit together (:func:`check_call`).

    Example:
        >>> ones = torch.ones(1, 4, 1, 1)
        >>> value, gates = torch.tensor([0.0, 2.0, 4.0, 6.0]).view(1, 4, 1, 1), torch.tensor([0.0, 0.0, 1.0])
        >>> small = {"compress_length": 2, "compress_stride": 2, "block_size": 2, "block_count": 1, "window": 2}
        >>> call = ones, ones, value, ones[:, :2], value[:, 2:], gates.expand(1, 4, 1, 3)
        >>> native_sparse(*call, **small, first_blocks=0, last_blocks=1).flatten()  # the window's means
        tensor([0., 1., 3., 5.])
    """
    made = Sizes(**sizes)
    query, key, value = cast_as_autocast(query), cast_as_autocast(key), cast_as_autocast(value)
    compressed_key, compressed_value = cast_as_autocast(compressed_key), cast_as_autocast(compressed_value)
    window_key = key if window_key is None else cast_as_autocast(window_key)
    window_value = value if window_value is None else cast_as_autocast(window_value)
    check_call(query, key, value, compressed_key, compressed_value, gates, window_key, window_value, cu_seq_lens, made)
    tokens = query.shape[1]
    places = Places.of(query.shape[:2].numel(), bounds_of(query, cu_seq_lens), made)
    token = torch.arange(len(places.begin), device=query.device)
    causal = (places.sequence[:, None] == places.sequence) & (token <= token[:, None])
    in_window = causal & (token > token[:, None] - made.window)
    of_compressed, weights = attended_compressed(query, compressed_key, compressed_value, places, scaling)
    chosen = chosen_blocks(weights.detach().sum(2), places, blocks_of(tokens, made), made)
    is_chosen = torch.zeros(*chosen.shape[:2], blocks_of(tokens, made) + 1, dtype=torch.bool, device=query.device)
    is_chosen.scatter_(-1, chosen.long() % is_chosen.shape[-1], True)  # -1 is one more block, which has no key
    of_selected, _ = _attended(query, key, value, causal.unsqueeze(1) & is_chosen[..., places.block], scaling)
    of_window, _ = _attended(query, window_key, window_value, in_window.unsqueeze(1), scaling)
    mixed = torch.stack([of_compressed, of_selected, of_window], -1).view(*query.shape[:3], value.shape[3], 3)
    return (mixed * gates.to(mixed.dtype).unsqueeze(3)).sum(-1).to(query.dtype)


def _attended(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scaling: float | None
) -> tuple[Tensor, Tensor]:
    """The output ``[N, G, H / G, V]`` and the weights ``[N, G, H / G, keys]``; ``visible[N, 1 or G, keys]``."""
    wide, (heads, width), groups = compute_dtype(query), query.shape[2:], key.shape[2]
    by_group = query.to(wide).reshape(-1, groups, heads // groups, width)
    logits = torch.einsum("ngrd,sgd->ngrs", by_group, key.to(wide).flatten(0, 1))
    logits = logits * (width**-0.5 if scaling is None else scaling)
    some = visible.any(-1, keepdim=True)
    logits = logits.masked_fill((~visible & some).unsqueeze(2), -torch.inf)
    weights = logits.softmax(-1).masked_fill(~visible.unsqueeze(2), 0.0)
    return torch.einsum("ngrs,sgv->ngrv", weights, value.to(wide).flatten(0, 1)), weights


def attended_compressed(
    query: Tensor, key: Tensor, value: Tensor, places: Places, scaling: float | None
) -> tuple[Tensor, Tensor]:
    """Of each token the output over the compressed keys that it sees ``[N, G, H / G, V]``, and their weights.

    Example:
        >>> sizes = Sizes(compress_length=2, compress_stride=2, block_size=2, block_count=3, window=1)
        >>> query, keys = torch.ones(1, 2, 1, 1), torch.full((1, 1, 1, 1), 3.0)
        >>> attended_compressed(query, keys, keys, Places.of(2, bounds_of(query, None), sizes), None)[0].flatten()
        tensor([0., 3.])
    """
    place = torch.arange(key.shape[:2].numel(), device=query.device)
    complete = (place >= places.compressed_begin[:, None]) & (place < places.compressed_stop[:, None])
    return _attended(query, key, value, complete.unsqueeze(1), scaling)


def blocks_of(tokens: int, sizes: Sizes) -> int:
    """The blocks of a row of so many tokens, of which the last may be cut off.

    Example:
        >>> blocks_of(65, Sizes())
        2
    """
    return -(-tokens // sizes.block_size)


def chosen_blocks(weights: Tensor, places: Places, blocks: int, sizes: Sizes) -> Tensor:
    """Which blocks each query attends to: the first and the last ones, and those with the highest scores.

    The score of a block sums the weights of the compressed keys that overlap it, times the strides that both share. Of
    equal scores, that of the earlier block counts as higher.

    Args:
        weights: ``[N, G, M]``, of a query's heads of a key head, summed.
        places: of the tokens.
        blocks: the blocks of the longest sequence.
        sizes: those of the op.

    Returns:
        int32 ``[N, G, min(block_count, blocks)]``: blocks within the sequence, rising, and then -1 where there are no
        more up to the query.

    Example:
        >>> sizes = Sizes(1, 1, 2, 2, 1, 1)
        >>> places = Places.of(6, torch.tensor([0, 6]), sizes)
        >>> weights = torch.tensor([0.1, 0.1, 0.2, 0.2, 0.2, 0.2]).expand(6, 1, 6)
        >>> chosen_blocks(weights, places, 3, sizes)[:, 0].tolist()
        [[0, -1], [0, -1], [0, 1], [0, 1], [0, 2], [0, 2]]
    """
    scores = block_scores(weights, places, blocks, sizes)
    # Stable, so that of equal scores the earlier block comes first.
    order = scores.argsort(dim=-1, descending=True, stable=True)[..., : sizes.block_count]
    rising = torch.where(scores.gather(-1, order) == -torch.inf, blocks, order).sort(-1)[0]
    return torch.where(rising == blocks, -1, rising).to(torch.int32)


def block_scores(weights: Tensor, places: Places, blocks: int, sizes: Sizes) -> Tensor:
    """The scores ``[N, G, blocks]`` of :func:`chosen_blocks`: of blocks always chosen ``inf``, of later ones ``-inf``.

    Example:
        >>> sizes = Sizes(1, 1, 2, 1, 0, 1)
        >>> places = Places.of(6, torch.tensor([0, 6]), sizes)
        >>> block_scores(torch.full((6, 1, 6), 0.25), places, 3, sizes)[3, 0]
        tensor([0.5000,    inf,   -inf])
    """
    block = torch.arange(blocks, device=weights.device)
    scores = weights.new_zeros(*weights.shape[:2], blocks)
    first, stop = places.compressed_begin[:, None], places.compressed_stop[:, None].clamp_max(weights.shape[-1])
    for place, count in sizes.overlaps() if weights.shape[-1] else ():
        index = first + block * (sizes.block_size // sizes.compress_stride) + place
        valid = (index >= first) & (index < stop)
        taken = torch.where(valid, index, 0).unsqueeze(1).expand(-1, weights.shape[1], -1)
        scores = scores + weights.gather(-1, taken).masked_fill(~valid.unsqueeze(1), 0.0) * count
    own = places.block[:, None]
    always = (block < sizes.first_blocks) | (block > own - sizes.last_blocks)
    scores = scores.nan_to_num(nan=torch.finfo(scores.dtype).max).masked_fill(always.unsqueeze(1), torch.inf)
    return scores.masked_fill((block > own).unsqueeze(1), -torch.inf)


def check_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    compressed_key: Tensor,
    compressed_value: Tensor,
    gates: Tensor,
    window_key: Tensor | None,
    window_value: Tensor | None,
    cu_seq_lens: Tensor | None,
    sizes: Sizes,
) -> None:
    """Check that the inputs of a call fit together. A kernel calls it first. It reads shapes and dtypes, and no values.

    Raises:
        ValueError: a shape or dtype doesn't fit to the others.

    Example:
        >>> x = torch.zeros(1, 40, 2, 8)
        >>> check_call(x, x, x, x[:, :1], x[:, :1], torch.zeros(1, 40, 2, 3), None, None, None, Sizes())
        >>> check_call(x, x, x, x[:, :3], x[:, :1], torch.zeros(1, 40, 2, 3), None, None, None, Sizes())
        Traceback (most recent call last):
            ...
        ValueError: native_sparse: compressed_key is [1, 3, 2, 8]; give [1, 1, 2, 8]
    """
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4 or not key.shape[2] or query.shape[2] % key.shape[2]:
        shapes = f"query is {list(query.shape)}, key {list(key.shape)} and value {list(value.shape)}"
        raise ValueError(
            f"native_sparse: {shapes}; give [B, T, H, D], [B, T, G, D] and [B, T, G, V], H a multiple of G"
        )
    (batch, tokens, heads, width), groups, value_width = query.shape, key.shape[2], value.shape[3]
    count = sizes.compressed(tokens)
    if cu_seq_lens is not None:
        count = compressed_key.shape[1] if compressed_key.dim() == 4 else 0  # only the values of the bounds say it
        if batch != 1 or cu_seq_lens.dim() != 1 or len(cu_seq_lens) < 2:
            found = f"cu_seq_lens is {list(cu_seq_lens.shape)} and the batch {batch}"
            raise ValueError(f"native_sparse: {found}; give [sequences + 1] with a batch of one")
    wanted = {
        "key": (key, (batch, tokens, groups, width)),
        "value": (value, (batch, tokens, groups, value_width)),
        "compressed_key": (compressed_key, (batch, count, groups, width)),
        "compressed_value": (compressed_value, (batch, count, groups, value_width)),
        "gates": (gates, (batch, tokens, heads, 3)),
        "window_key": (window_key, (batch, tokens, groups, width)),
        "window_value": (window_value, (batch, tokens, groups, value_width)),
    }
    for name, (tensor, shape) in wanted.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"native_sparse: {name} is {list(tensor.shape)}; give {list(shape)}")
        if tensor is not None and name != "gates" and tensor.dtype != query.dtype:
            found = f"{name} is {tensor.dtype} and query {query.dtype}"
            raise ValueError(f"native_sparse: {found}; give both in one dtype")
