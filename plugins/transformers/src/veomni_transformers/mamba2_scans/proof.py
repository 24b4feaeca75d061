"""What a scan of Mamba computes: its values and gradients, compared with the contract's recurrence."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from veomni_ops import mamba2_scan, selective_scan
from veomni_ops.contract import Contract
from veomni_transformers.proving import probe
from veomni_transformers.proving.branches import Branches
from veomni_transformers.proving.code_reading import read_function
from veomni_transformers.proving.matching import Candidate, first_fit, if_every_branch_ran, standard_mixer
from veomni_transformers.proving.package_functions import chosen, written
from veomni_transformers.proving.proof import Proof

_DECAY, _STRONG_DECAY = 0.3, 4.0


def prove(function: Any, home: str, scan: Scan) -> Proof:
    """What the ``function`` of a ``scan`` computes, which a module of the modeling file ``home`` calls."""
    own, runs = written(function), chosen(function, home)
    if not isinstance(own, FunctionType):
        return Proof(None, f"the model runs {runs}, and {home} has no code of its own to compare", examined=False)
    reading = read_function(own)
    if reading.doubts:
        return Proof(None, reading.doubts[0])
    branches = Branches(reading.codes, frozenset(), own, is_helper=True)
    with probe.seeded():
        return first_fit(_candidates(own, branches, runs, scan), f"{own.__name__} takes none of the op's calls")


def gives_nothing(function: Any) -> str:
    """Why the fused ``function``, which a mixer tries before its scan, can't be left out; empty if it can.

    The one of transformers' modeling files returns ``None``, whatever it is given, and the mixer then runs its scan.
    Where a package's function was chosen, this is still what is beneath, and both compute the same.
    """
    own = written(function)
    name = getattr(own, "__name__", type(own).__name__)
    if not isinstance(own, FunctionType):
        return f"in training it calls {name}, which is no function that can be read"
    reading = read_function(own)
    if reading.doubts:
        return reading.doubts[0]
    required = [p for p in inspect.signature(own).parameters.values() if p.default is p.empty]
    branches = Branches(reading.codes, frozenset(), own, is_helper=True)
    given = [None for p in required if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    found, error = probe.attempt(partial(branches.run_call, own, *given))
    if error or found is not None:
        return f"in training it calls {name}, which computes something by itself"
    return if_every_branch_ran(Proof("standard", ""), f"{name} gives nothing", branches).evidence


def _candidates(function: FunctionType, branches: Branches, runs: str, scan: Scan) -> Iterator[Candidate]:
    miss = max(_miss(branches, function, call, scan) for call in scan.calls)
    yield standard_mixer(function.__name__, miss, runs, branches)


@dataclass(frozen=True)
class _Call:
    """One call, in chunks of ``chunk`` tokens; ``heads`` and groups, head and state ``widths``."""

    batch: int
    length: int
    chunk: int = 16
    heads: tuple[int, int] = (4, 2)
    widths: tuple[int, int] = (6, 8)
    decay: float = _DECAY
    has_state: bool = False
    keeps_final: bool = False
    is_model_like: bool = True
    limit: tuple[float, float] = (0.0, float("inf"))
    dtype: torch.dtype = torch.float32

    def inputs(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Its random tensors, all of which require gradients, and its other arguments."""
        tokens, (heads, groups), (width, state) = (self.batch, self.length), self.heads, self.widths
        tensors = {
            "x": probe.random(*tokens, heads, width, dtype=self.dtype),
            "dt": probe.random(*tokens, heads, dtype=self.dtype),
            "A": -self.decay * (0.1 + probe.random(heads).abs()),
            "B": probe.random(*tokens, groups, state, dtype=self.dtype, scale=state**-0.5),
            "C": probe.random(*tokens, groups, state, dtype=self.dtype),
        }
        if self.is_model_like:
            tensors |= {name: probe.random(heads, dtype=self.dtype) for name in ("D", "dt_bias")}
        else:
            tensors["dt"] = tensors["dt"].sigmoid()
        if self.has_state:
            tensors["initial_states"] = probe.random(self.batch, heads, width, state)
        options = {"dt_softplus": self.is_model_like, "return_final_states": self.keeps_final, "dt_limit": self.limit}
        return {name: each.requires_grad_() for name, each in tensors.items()}, options


@dataclass(frozen=True)
class _SelectiveCall:
    """One call of the scan of Mamba 1."""

    batch: int
    length: int
    channels: int = 6
    state: int = 8
    decay: float = _DECAY
    keeps_final: bool = False
    is_model_like: bool = True
    dtype: torch.dtype = torch.float32

    def inputs(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Its random tensors, all of which require gradients, and its other arguments."""
        along = (self.batch, self.channels, self.length)
        tensors = {name: probe.random(*along, dtype=self.dtype) for name in ("x", "dt", "z")}
        for name, scale in (("B", self.state**-0.5), ("C", 1.0)):
            tensors[name] = probe.random(self.batch, self.state, self.length, dtype=self.dtype, scale=scale)
        tensors["A"] = -self.decay * (0.1 + probe.random(self.channels, self.state).abs())
        if self.is_model_like:
            tensors |= {name: probe.random(self.channels) for name in ("D", "dt_bias")}
        else:
            tensors = {**tensors, "dt": tensors["dt"].sigmoid()}
            del tensors["z"]
        options = {"dt_softplus": self.is_model_like, "return_final_states": self.keeps_final}
        return {name: each.requires_grad_() for name, each in tensors.items()}, options


@dataclass(frozen=True)
class Scan:
    """A kind of scan: its contract, how its functions name arguments that the op names otherwise, and probing calls."""

    contract: Contract
    named: Mapping[str, str]
    calls: Sequence[_Call | _SelectiveCall]


CHUNKED = Scan(
    mamba2_scan.CONTRACTS["standard"],
    {"x": "hidden_states"},
    (
        _Call(2, 37, has_state=True, keeps_final=True),
        _Call(1, 32, widths=(5, 7)),
        _Call(2, 1, keeps_final=True),
        _Call(1, 5, chunk=8, heads=(3, 1), has_state=True),
        _Call(1, 20, decay=_STRONG_DECAY, has_state=True, keeps_final=True),
        _Call(2, 21, is_model_like=False, keeps_final=True),
        _Call(1, 40, chunk=256, limit=(0.4, 0.9)),
        _Call(1, 37, has_state=True, keeps_final=True, dtype=torch.bfloat16),
    ),
)
SELECTIVE = Scan(
    selective_scan.CONTRACTS["standard"],
    {
        "x": "hidden_states",
        "dt_bias": "delta_bias",
        "dt_softplus": "delta_softplus",
        "return_final_states": "return_last_state",
    },
    (
        _SelectiveCall(2, 37, keeps_final=True),
        _SelectiveCall(1, 32, channels=5, state=7),
        _SelectiveCall(2, 1, keeps_final=True),
        _SelectiveCall(1, 20, decay=_STRONG_DECAY, keeps_final=True),
        _SelectiveCall(2, 21, is_model_like=False, keeps_final=True),
        _SelectiveCall(1, 37, keeps_final=True, dtype=torch.bfloat16),
    ),
)


def _miss(branches: Branches, function: FunctionType, call: _Call | _SelectiveCall, scan: Scan) -> float:
    tensors, options = call.inputs()
    own = {scan.named.get(name, name): each for name, each in {**tensors, **options}.items()}
    if isinstance(call, _Call):
        own["chunk_size"] = call.chunk
    found, error = probe.attempt(partial(branches.run_call, function, **own))
    results = found if isinstance(found, tuple) else (found,)
    contract = scan.contract
    if error or len(results) != 1 + call.keeps_final or not all(isinstance(each, Tensor) for each in results):
        return float("inf")
    wanted = contract.primary(contract.reference(**tensors, **options))
    pairs = list(zip(results, wanted, strict=True))
    if call.dtype is torch.float32:
        return max(probe.miss(ours, theirs, list(tensors.values())) for ours, theirs in pairs)
    if any(a.dtype != b.dtype or a.shape != b.shape for a, b in pairs):
        return float("inf")
    shares = [float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs]
    return 0.0 if max(shares) <= contract.values["bfloat16"].norm else max(shares)
