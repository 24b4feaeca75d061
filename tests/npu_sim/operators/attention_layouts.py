"""The layouts of npu_fusion_attention, and its limits on shapes: every call is a list of [B, N, S, D] blocks."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from npu_sim.operators.limits import require, require_dims

NAME = "npu_fusion_attention"
LARGEST_HEAD = 768
MOST_HEADS = 256
# Where batch, heads, sequence and head dimension are, once the last axis of BSH and SBH is cut into heads.
_AXES = {"BSH": (0, 2, 1, 3), "SBH": (1, 2, 0, 3), "BSND": (0, 2, 1, 3), "BNSD": (0, 1, 2, 3)}


@dataclass(frozen=True)
class Layout:
    """How the tensors of one call lie in memory; the ends of its sequences where they are packed (TND)."""

    name: str
    head_num: int
    query_ends: tuple[int, ...] = ()
    key_ends: tuple[int, ...] = ()

    def blocks_of_queries(self, query: Tensor) -> list[Tensor]:
        """``query`` (or what has its shape) as blocks [B, N, Sq, D]."""
        return self._blocks(query, self.head_num, self.query_ends)

    def blocks_of_keys(self, tensor: Tensor, heads: int) -> list[Tensor]:
        """Keys or values as blocks [B, Nkv, Skv, D]."""
        return self._blocks(tensor, heads, self.key_ends)

    def join(self, blocks: list[Tensor]) -> Tensor:
        """The tensor in this layout that has these blocks."""
        if self.name == "TND":
            return torch.cat([block[0].transpose(0, 1) for block in blocks])
        (block,) = blocks
        joined = block.permute(*(_AXES[self.name].index(axis) for axis in range(4)))
        return (joined.flatten(2) if len(self.name) == 3 else joined).contiguous()

    def _blocks(self, tensor: Tensor, heads: int, ends: tuple[int, ...]) -> list[Tensor]:
        if self.name == "TND":
            return [tensor[start:end].transpose(0, 1).unsqueeze(0) for start, end in pairwise((0, *ends))]
        cut = tensor.unflatten(2, (heads, -1)) if len(self.name) == 3 else tensor
        return [cut.permute(*_AXES[self.name])]


def read_layout(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, name: str, query_ends: list[int], key_ends: list[int]
) -> tuple[Layout, int]:
    """The layout of a call and its number of key heads; raises where the shapes are not legal."""
    require(name in (*_AXES, "TND"), f"{NAME}: input_layout must be one of {', '.join((*_AXES, 'TND'))}, not {name!r}")
    for argument, tensor in {"query": query, "key": key, "value": value}.items():
        require_dims(NAME, argument, tensor, (len(name),))
    if name == "TND":
        require(bool(query_ends and key_ends), f"{NAME}: TND needs actual_seq_qlen and actual_seq_kvlen")
        _require_ends("actual_seq_qlen", query_ends, query.shape[0])
        _require_ends("actual_seq_kvlen", key_ends, key.shape[0])
        require(len(query_ends) == len(key_ends), f"{NAME}: {len(query_ends)} queries' ends, {len(key_ends)} keys'")
    layout = Layout(name, head_num, tuple(query_ends), tuple(key_ends))
    key_heads = _key_heads(query, key, head_num, name)
    _require_heads(layout, query, key, value, key_heads)
    return layout, key_heads


def _key_heads(query: Tensor, key: Tensor, head_num: int, name: str) -> int:
    if name in ("BSH", "SBH"):
        require(query.shape[2] % head_num == 0, f"{NAME}: {query.shape[2]} is not {head_num} heads")
        return key.shape[2] // (query.shape[2] // head_num)
    heads = name.index("N")
    require(query.shape[heads] == head_num, f"{NAME}: head_num {head_num}, but query has {query.shape[heads]} heads")
    return key.shape[heads]


def _require_heads(layout: Layout, query: Tensor, key: Tensor, value: Tensor, key_heads: int) -> None:
    heads = layout.head_num
    require(0 < heads <= MOST_HEADS, f"{NAME}: 1 to {MOST_HEADS} heads, but got {heads}")
    require(
        key_heads > 0 and heads % key_heads == 0,
        f"{NAME}: {heads} query heads are no multiple of {key_heads} key heads",
    )
    q, k = layout.blocks_of_queries(query)[0], layout.blocks_of_keys(key, key_heads)[0]
    v = layout.blocks_of_keys(value, key_heads)[0]
    require(q.shape[0] == k.shape[0] == v.shape[0], f"{NAME}: batch sizes differ")
    require(k.shape[1:3] == v.shape[1:3], f"{NAME}: key and value differ in heads or length")
    require(
        q.shape[3] == k.shape[3] and v.shape[3] <= k.shape[3] <= LARGEST_HEAD,
        f"{NAME}: needs Dq = Dk >= Dv and D up to {LARGEST_HEAD}, but got {q.shape[3]}, {k.shape[3]}, {v.shape[3]}",
    )


def _require_ends(name: str, ends: list[int], tokens: int) -> None:
    require(
        all(start <= end for start, end in pairwise((0, *ends))), f"{NAME}: {name} must be cumulative, but got {ends}"
    )
    require(ends[-1] == tokens, f"{NAME}: {name} ends at {ends[-1]}, but there are {tokens} tokens")
