"""Finds and proves DeepSeek-V4's indexers, which choose among compressed keys.

Their own forward runs in small copies. The scores that come to its top k, and what it chooses, are compared with the
contract's reference, on what the bound forward gives a kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from veomni_core.changes.change import Change, ForwardChange
from veomni_core.descriptions.kernel_spec import KernelSpec
from veomni_core.sites.site import Kernel, Site
from veomni_ops import dsa_indexer
from veomni_ops.visible_keys import as_mask
from veomni_transformers.forwards.compressed_indexer import compressed_indexer_forward
from veomni_transformers.proving import probe
from veomni_transformers.proving.branches import Branches
from veomni_transformers.proving.code_reading import guarded_names, read_function, unseen_changes
from veomni_transformers.proving.functions import current_forward
from veomni_transformers.proving.matching import Candidate, first_fit
from veomni_transformers.proving.module_locator import ModuleLocator
from veomni_transformers.proving.proof import Proof
from veomni_transformers.proving.reachable_code import own_function
from veomni_transformers.sparse_attention.topk import TopK

_CHILDREN = ("kv_proj", "gate_proj", "kv_norm", "q_b_proj", "rotary_emb", "scorer")
_READ = (*_CHILDREN, "position_bias")
# Of small copies: rows, hidden size, width of latent queries, heads (so many that no score is 0), columns of a head,
# half of those that are rotated, chosen keys.
_BATCH, _H, _Q, _HEADS, _WIDTH, _TURNED, _TOP_K = 2, 20, 18, 16, 12, 4, 3


class CompressedIndexers(ModuleLocator):
    """Indexers that compress the tokens of a window to one key each, and score keys by a child ``scorer``."""

    op_name = "dsa_indexer"

    def is_candidate(self, module: nn.Module) -> bool:
        return is_compressed(module)

    def prove(self, module: nn.Module) -> Proof:
        return _prove(module)

    def sizes(self, module: Any) -> Mapping[str, tuple[int, ...]]:
        return {"heads": (module.num_heads,), "head_dim": (module.head_dim,), "top_k": (module.index_topk,)}

    def called(self, site: Site) -> tuple[str, ...]:
        return _READ

    def install(self, model: nn.Module, site: Site, kernel: Kernel, spec: KernelSpec) -> Iterable[Change]:
        module = model.get_submodule(site.path)
        guarded = guarded_names(module, self.readings.of(module), _READ)
        forward = compressed_indexer_forward(current_forward(module), kernel)
        yield ForwardChange(module, forward, guarded, calls=_CHILDREN)


def is_compressed(module: Any) -> bool:
    """Whether ``module`` has the children of an indexer over compressed keys."""
    return isinstance(module, nn.Module) and {*_CHILDREN} == {*module._modules} and hasattr(module, "compress_rate")


def _prove(module: Any) -> Proof:
    reading = read_function(type(module).forward, type(module))
    if why_not := unseen_changes(module, reading, _READ):
        return Proof(None, why_not)
    branches = Branches(reading.codes, guarded_names(module, reading, _READ), own_function(module))
    with probe.seeded():
        small, own = _small(module), type(module).forward
        worst = 0.0
        for length, cache in _lengths(small.compress_rate):
            tensors = probe.random(_BATCH, length, _H), probe.random(_BATCH, length, _Q)
            before = 0 if cache is None else cache.tokens
            call = small, *tensors, (torch.arange(length) + before).unsqueeze(0)
            with TopK() as taken:
                found, error = probe.attempt(partial(branches.run_call, own, *call, cache, 0))
            given: list[Any] = []
            bound = compressed_indexer_forward(own, partial(_recorded, given))
            chosen, other = probe.attempt(partial(bound, *call, cache, 0))
            if error or other:
                return Proof(None, error or f"up to its scores: {other}", examined=False)
            worst = max(worst, _miss(found, chosen, taken.seen, given))
        evidence = "its scores of compressed keys and its choice are the reference's"
        rounding = "keys whose scores differ by rounding alone, of which another may be chosen"
        proof = Proof("standard", evidence, left_out={"": rounding})
        candidate = Candidate("an indexer of compressed keys", worst, proof, branches)
        return first_fit([candidate], "what it chooses is not the top k of an indexer's scores")


def _recorded(given: list[Any], *call: Any) -> Tensor:
    given.extend(call)
    return dsa_indexer.standard(*call)


def _miss(found: Tensor, chosen: Tensor, taken: list[tuple[Tensor, Tensor]], given: list[Any]) -> float:
    query, keys, weights, visible, _ = given
    none = keys.shape[1]
    same = torch.where(found < 0, none, found).sort(-1)[0], torch.where(chosen < 0, none, chosen)
    if len(taken) != 1 or found.dtype != chosen.dtype or not torch.equal(*same):
        return float("inf")
    seen = as_mask(visible, none)
    scores, wanted = taken[0][0], dsa_indexer.index_scores(query, keys, weights)
    if not bool((scores[~seen] == -torch.inf).all()):
        return float("inf")
    return 0.0 if probe.close(scores[seen], wanted[seen]) else probe.largest_miss(scores[seen], wanted[seen])


def _small(module: Any) -> Any:
    small: Any = probe.bare_copy(module)
    small.num_heads, small.head_dim, small.index_topk = _HEADS, _WIDTH, _TOP_K
    small.position_bias = nn.Parameter(probe.random(small.compress_rate, 2 * _WIDTH))
    for name, into, out in (("kv_proj", _H, 2 * _WIDTH), ("gate_proj", _H, 2 * _WIDTH), ("q_b_proj", _Q, None)):
        small._modules[name] = _linear(into, out or _HEADS * _WIDTH)
    for name in ("kv_norm", "rotary_emb", "scorer"):
        small._modules[name] = probe.bare_copy(module._modules[name])
    small.kv_norm._parameters["weight"] = nn.Parameter(probe.random(_WIDTH))
    for name in module.rotary_emb._buffers:
        small.rotary_emb._buffers[name] = probe.random(_TURNED)
    small.scorer._modules["weights_proj"] = _linear(_H, _HEADS)
    return small


def _linear(into: int, out: int) -> nn.Linear:
    linear = nn.Linear(into, out, bias=False)
    with torch.no_grad():
        linear.weight.copy_(probe.random(out, into, scale=into**-0.5))
    return linear


class _Cache:
    """What a cache of one layer does: completes windows with the tokens that it holds, and keeps compressed keys."""

    def __init__(self, rate: int, windows: int, left: int) -> None:
        self.rate, self.windows, self.tokens = rate, windows, windows * rate + left
        self._left = tuple(probe.random(_BATCH, left, 2 * _WIDTH) for _ in range(2))
        self._prior = tuple(probe.random(_BATCH, rate, _WIDTH) for _ in range(2)) if windows else (None, None)
        self._keys = probe.random(_BATCH, windows, _WIDTH)
        self.layers = (self,)

    def store_compression_weights(self, name: str, keys: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, int]:
        keys, gate = (torch.cat(each, dim=1) for each in zip(self._left, (keys, gate), strict=True))
        whole = keys.shape[1] // self.rate * self.rate
        return keys[:, :whole], gate[:, :whole], self.windows * self.rate

    def update_overlap_state(self, name: str, keys: Tensor, gate: Tensor, width: int) -> tuple[Any, ...]:
        return self._prior

    def update_compressor_states(self, name: str, keys: Tensor) -> Tensor:
        return torch.cat([self._keys, keys], dim=1)


def _lengths(rate: int) -> Iterator[tuple[int, _Cache | None]]:
    """How many tokens a call has, and what came before: several windows, one and none, with and without a cache."""
    yield from ((length, None) for length in (3 * rate + 1, rate + 1, 1))
    yield 2 * rate, _Cache(rate, 2, 1)
    yield 2 * rate, _Cache(rate, 0, 1)
    yield 1, _Cache(rate, 5, 0)
