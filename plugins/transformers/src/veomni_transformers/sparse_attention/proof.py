"""What indexers and the attention over their choice compute: their own code in small copies, beside the bound forwards.

An indexer's scores are compared, as they come to its top k. Of an attention, output and gradients are compared, eager
over expanded keys and a mask, bound over latents and the contract's reference.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from veomni_core.changes.bound_subclass import eager_class
from veomni_core.descriptions.kernel_spec import EAGER
from veomni_ops import dsa_attention
from veomni_ops.dsa_indexer import index_scores
from veomni_transformers.forwards.sparse_attention import IndexerLayout, attention_forward
from veomni_transformers.proving import probe
from veomni_transformers.proving.branches import Branches
from veomni_transformers.proving.code_reading import guarded_names, read_function, unseen_changes
from veomni_transformers.proving.functions import global_functions
from veomni_transformers.proving.matching import Candidate, first_fit
from veomni_transformers.proving.proof import Proof
from veomni_transformers.proving.reachable_code import own_function
from veomni_transformers.sparse_attention.topk import TopK

INDEXER_CHILDREN = ("wq_b", "wk", "k_norm", "weights_proj")
_ROTARY = "apply_rotary_pos_emb"
_BATCH, _LENGTH, _CACHED = 2, 11, 3
_F32 = torch.float32
# The sizes of small copies, by the attributes that state them. All differ, so that none is taken for another.
_SIZES = {
    "hidden_size": 20,
    "q_lora_rank": 18,
    "kv_lora_rank": 14,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 10,
    "qk_head_dim": 18,
    "v_head_dim": 6,
    "num_heads": 3,
    "n_heads": 16,  # so many that no key has the score 0 for all of them
    "head_dim": 12,
    "index_topk": 5,
}
_H, _Q, _KV, _ROPE = (_SIZES[name] for name in ("hidden_size", "q_lora_rank", "kv_lora_rank", "qk_rope_head_dim"))
_HEADS, _NOPE, _V, _QK = (_SIZES[name] for name in ("num_heads", "qk_nope_head_dim", "v_head_dim", "qk_head_dim"))
_LINEARS = {
    "q_a_proj": (_H, _Q),
    "q_b_proj": (_Q, _HEADS * _QK),
    "q_gate_proj": (2 * _Q, _HEADS * (_QK + _V)),
    "kv_a_proj_with_mqa": (_H, _KV + _ROPE),
    "kv_b_proj": (_KV, _HEADS * (_NOPE + _V)),
    "o_proj": (_HEADS * _V, _H),
    "gate_proj": (_H, _HEADS * _V),
    "g_proj": (_H, _HEADS),
    "wq_b": (_Q, _SIZES["n_heads"] * _SIZES["head_dim"]),
    "wk": (_H, _SIZES["head_dim"]),
    "weights_proj": (_H, _SIZES["n_heads"]),
}
_NORMS = {
    "q_a_layernorm": _Q,
    "kv_a_layernorm": _KV,
    "k_rope_only_layernorm": _ROPE,
    "k_norm": _SIZES["head_dim"],
}


def prove_indexer(module: Any) -> Proof:
    """Which keys the indexer ``module`` chooses, and how it rotates; or why that could not be proven."""
    reading = read_function(type(module).forward, type(module))
    if why_not := unseen_changes(module, reading, INDEXER_CHILDREN):
        return Proof(None, why_not)
    if type(module.k_norm) is not nn.LayerNorm or module.k_norm.bias is None:
        return Proof(None, f"its k_norm is a {type(module.k_norm).__name__}, expected a LayerNorm with a bias")
    branches = Branches(reading.codes, guarded_names(module, reading, INDEXER_CHILDREN), own_function(module))
    with probe.seeded():
        small, why_not = _small(module)
        if small is None:
            return Proof(None, why_not)
        runs = []
        for call in _indexer_calls():
            given = call.given(small)
            with TopK() as scores:
                found, error = probe.attempt(partial(branches.run_call, type(module).forward, *given, **call.options()))
            if error:
                return Proof(None, error, examined=False)
            if len(scores.seen) != 1 or not torch.equal(found, scores.seen[0][1].to(torch.int32)):
                return Proof(None, "what it returns is not the indices of the one top k that it takes")
            runs.append((given, call, scores.seen[0][0]))
        return first_fit(_indexer_candidates(module, runs, branches), "it takes no inputs of an indexer")


def indexer_layout(module: nn.Module, detail: Mapping[str, Any]) -> IndexerLayout:
    """The layout that was proven for the indexer ``module``."""
    functions = dict(global_functions(eager_class(type(module)).forward))
    return IndexerLayout(functions[detail["rotary"]], detail["rotates_first"])


def _indexer_candidates(module: Any, runs: list[Any], branches: Branches) -> Iterator[Candidate]:
    names = [name for name, _ in global_functions(type(module).forward) if name.startswith(_ROTARY)]
    for name in dict.fromkeys(names):
        for first in (True, False):
            detail = {"rotary": name, "rotates_first": first}
            layout = indexer_layout(module, detail)
            miss = max(_score_miss(layout, *run) for run in runs)
            evidence = f"its scores are the reference's, {name} on its {'first' if first else 'last'} columns"
            yield Candidate(
                f"{name} on the {'first' if first else 'last'} columns", miss, _indexer(evidence, detail), branches
            )


def _indexer(evidence: str, detail: dict[str, Any]) -> Proof:
    rounding = "keys whose scores differ by rounding alone, of which another may be chosen"
    return Proof("standard", evidence, detail, left_out={"": rounding})


def _score_miss(layout: IndexerLayout, given: tuple[Any, ...], call: _Call, found: Tensor) -> float:
    small, hidden, latents, positions, mask, *_ = given
    with torch.no_grad():
        inputs, error = probe.attempt(lambda: layout.inputs(small, hidden, latents, positions))
    if error:
        return float("inf")
    query, key, weights = inputs
    if call.cached is not None:
        key = torch.cat([call.cached[2].to(key.dtype), key], dim=1)
    wanted = index_scores(query.float(), key.float(), weights)
    hidden_keys = (~mask if mask.dtype == torch.bool else mask < 0).expand_as(wanted)
    if not bool((found[hidden_keys] < -1e30).all()):
        return float("inf")
    return 0.0 if probe.close(found[~hidden_keys], wanted[~hidden_keys]) else probe.largest_miss(found, wanted)


def prove_attention(module: Any, of_indexer: Proof | None) -> Proof:
    """Whether ``module`` attends to the keys of its indices; ``of_indexer`` is its indexer's proof, if it has one."""
    reading = read_function(type(module).forward, type(module))
    live = called_by_attention(module)
    if why_not := unseen_changes(module, reading, (*live, "indexer")):
        return Proof(None, why_not)
    if of_indexer is not None and of_indexer.variant is None:
        return Proof(None, f"its indexer: {of_indexer.evidence}")
    unknown = [
        n for n, child in module._modules.items() if child is not None and n not in (*_LINEARS, *_NORMS, "indexer")
    ]
    if unknown:
        return Proof(None, f"nothing says the size of its {', '.join(unknown)}")
    needs = tuple(
        feature
        for feature, has in (("sinks", "sinks" in module._parameters), ("dropout", bool(module.attention_dropout)))
        if has
    )
    eager = dict(global_functions(type(module).forward))["eager_attention_forward"]
    replaced = read_function(eager).codes  # what it gave is compared, and a bound module doesn't run it
    codes = {code: optional for code, optional in reading.codes.items() if code not in replaced}
    branches = Branches(codes, guarded_names(module, reading, live), own_function(module))
    with probe.seeded():
        small, why_not = _small(module)
        if small is None:
            return Proof(None, why_not)
        if needs:
            return Proof("standard", f"not run, since it needs {' and '.join(needs)}", needs=needs)
        worst = 0.0
        own = type(module).forward
        bound = attention_forward(own, dsa_attention.standard, None, 0.0)
        for call in _attention_calls(small):
            # Masks of bools come with sdpa, where torch applies them, and those of numbers with eager attention.
            small.config._attn_implementation_internal = "sdpa" if call.mask.dtype == torch.bool else EAGER
            for training in reading.modes:
                given = call.given(small.train(training))
                (mine, error), (theirs, other) = (
                    probe.attempt(partial(branches.run_call, forward, *given, **call.options()))
                    for forward in (own, bound)
                )
                if error or other:
                    return Proof(None, error or f"over latents: {other}", examined=False)
                worst = max(worst, _attention_miss(mine, theirs, [given[1], *small.parameters()]))
        learns = (
            "its indexer's parameters get no gradient, as in eager code, unless the option indexer_loss is above 0"
            if of_indexer is not None
            else "it uses the choice of an earlier layer, whose indexer learns from that layer alone"
        )
        evidence = "its own code over a mask gave the values and gradients of the reference over latents"
        left_out = {"": f"queries that see no key: they get zeros, eager attention gives a mean; {learns}"}
        detail = {} if of_indexer is None else of_indexer.detail
        proof = Proof("standard", evidence, detail, left_out=left_out)
        candidate = Candidate("attention over chosen keys", worst, proof, branches)
        return first_fit([candidate], "it takes no inputs of an attention")


def called_by_attention(module: nn.Module) -> tuple[str, ...]:
    """What a bound attention module reads anew in each call: its children and parameters, but its indexer's layout."""
    return *(name for name in (*module._modules, *module._parameters) if name != "indexer"), "config"


def _attention_miss(mine: Any, theirs: Any, inputs: list[Tensor]) -> float:
    if len(mine) != len(theirs) or not all(torch.equal(a, b) for a, b in zip(mine[2:], theirs[2:], strict=True)):
        return float("inf")
    return probe.miss(theirs[0], mine[0], inputs)


@dataclass(frozen=True)
class _Call:
    """One call: its first tensors after ``self``, a mask, and the latents, rotated parts and index keys of a cache."""

    tensors: tuple[Any, ...]
    mask: Tensor
    cached: tuple[Tensor, Tensor, Tensor] | None = None
    further: Mapping[str, Any] | None = None
    dtype: torch.dtype = _F32

    def given(self, small: nn.Module) -> tuple[Any, ...]:
        """``small``, or a copy in the call's dtype, and the tensors; weights of an indexer's heads stay in float32."""
        if self.dtype is not _F32:
            small = copy.deepcopy(small).to(self.dtype)
            small.get_submodule("weights_proj").to(_F32)
        return small, *self.tensors, self.mask

    def options(self) -> dict[str, Any]:
        cache = None if self.cached is None else _Cache(*self.cached)
        return {"past_key_values": cache, "position_ids": None, **(self.further or {})}


class _Cache:
    """What a layer's cache does: puts earlier keys before those that it is given."""

    def __init__(self, latents: Tensor, rotated: Tensor, index_keys: Tensor) -> None:
        self._latents, self._rotated, self._index_keys = latents, rotated, index_keys

    def update(self, latents: Tensor, rotated: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        return torch.cat([self._latents, latents], dim=2), torch.cat([self._rotated, rotated], dim=2)

    def update_indexer(self, keys: Tensor, layer: int) -> Tensor:
        return torch.cat([self._index_keys.to(keys.dtype), keys], dim=1)


def _masks(keys: int) -> Iterator[Tensor]:
    """Causal masks ``[B, T, S]`` as bools and as added numbers, the second row of two packed sequences."""
    places = torch.arange(keys)
    seen = (places <= places[keys - _LENGTH :, None]).repeat(_BATCH, 1, 1)
    seen[1] &= (places >= 4) == (places[keys - _LENGTH :, None] >= 4)
    yield seen
    yield torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(_F32).min)


def _indexer_calls() -> Iterator[_Call]:
    for keys in (_LENGTH, _LENGTH + _CACHED):
        for mask in _masks(keys):
            for dtype in (_F32, torch.bfloat16):
                tensors = _hidden(dtype), probe.random(_BATCH, _LENGTH, _Q, dtype=dtype), _positions(dtype)
                yield _Call(tensors, mask, _cached() if keys > _LENGTH else None, dtype=dtype)


def _attention_calls(small: Any) -> Iterator[_Call]:
    for keys in (_LENGTH, _LENGTH + _CACHED):
        for mask in _masks(keys):
            further = None
            if getattr(small, "indexer", None) is None:
                # Each query's own key, which it sees, and three others of which it sees some.
                own = torch.arange(keys - _LENGTH, keys)[:, None]
                chosen = (own + torch.tensor([0, 2, 5, 7])) % keys
                further = {"prev_topk_indices": chosen.repeat(_BATCH, 1, 1).to(torch.int32)}
            tensors = _hidden(_F32).requires_grad_(), _positions(_F32)
            yield _Call(tensors, mask.unsqueeze(1), _cached() if keys > _LENGTH else None, further)


def _hidden(dtype: torch.dtype) -> Tensor:
    return probe.random(_BATCH, _LENGTH, _H, dtype=dtype)


def _positions(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angles = probe.random(_BATCH, _LENGTH, _ROPE // 2).repeat(1, 1, 2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _cached() -> tuple[Tensor, Tensor, Tensor]:
    latents, rotated = (probe.random(_BATCH, 1, _CACHED, width) for width in (_KV, _ROPE))
    return latents, rotated, probe.random(_BATCH, _CACHED, _SIZES["head_dim"])


def _small(module: Any) -> tuple[Any, str]:
    """A small copy of an attention module or an indexer, or the child of which nothing says the size."""
    small = probe.bare_copy(module)
    for name, size in _SIZES.items():
        if name in vars(small):
            setattr(small, name, size)
    if "config" in vars(small):
        small.config = copy.copy(module.config)
    for name, child in module._modules.items():
        if name in _LINEARS and child is not None:
            into, out = _LINEARS[name]
            linear = nn.Linear(into, out, bias=getattr(child, "bias", None) is not None)
            _fill(linear, into**-0.5)
            small._modules[name] = linear
        elif name in _NORMS and child is not None:
            norm = probe.bare_copy(child)
            for parameter, value in child._parameters.items():
                norm._parameters[parameter] = None if value is None else nn.Parameter(probe.random(_NORMS[name]))
            if "normalized_shape" in vars(norm):
                vars(norm)["normalized_shape"] = (_NORMS[name],)
            small._modules[name] = norm
        elif child is not None:
            part, why_not = _small(child)
            if part is None:
                return None, why_not
            small._modules[name] = part
        else:
            small._modules[name] = None
    return small, ""


def _fill(linear: nn.Linear, scale: float) -> None:
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.copy_(probe.random(*parameter.shape, scale=scale))
