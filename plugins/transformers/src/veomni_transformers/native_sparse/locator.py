"""Finds attention modules that call a function ``native_sparse_attention`` of their modeling file, and replaces it.

The model brings what makes compressed keys and gates: transformers has none of them. The function takes what the
contract's reference takes (:func:`veomni_ops.native_sparse.native_sparse`), and is proven by its values and gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn

from veomni_core.changes.change import Change
from veomni_core.descriptions.kernel_spec import KernelSpec
from veomni_core.sites.site import Kernel, Site
from veomni_ops.native_sparse import Sizes, native_sparse
from veomni_transformers.engine.engine_layout import EngineLayout
from veomni_transformers.proving import probe
from veomni_transformers.proving.branches import Branches
from veomni_transformers.proving.called_functions import Function, callers, replaced
from veomni_transformers.proving.code_read import ReadsForward
from veomni_transformers.proving.code_reading import Reading, read_function
from veomni_transformers.proving.matching import Candidate, first_fit
from veomni_transformers.proving.proof import Proof, ProvenOnce

_NAME, _VARIANT = "native_sparse_attention", "native_sparse"


class NativeSparseAttention(ReadsForward):
    """Finds the function by name, proves it by its values, and replaces it for one model."""

    def find(self, model: nn.Module, rule: str) -> Iterable[Site]:
        proofs: ProvenOnce[Proof] = ProvenOnce()
        for caller in callers(model, lambda name: name == _NAME):
            function = caller.functions[_NAME]
            proof = Proof(None, caller.why_not) if caller.why_not else proofs.of(function, partial(_prove, function))
            yield proof.site("attention", caller.path, rule, dtype=probe.parameter_dtype(caller.module))

    def sharded(self, site: Site, layout: EngineLayout) -> Site:
        """Heads of a key head choose together, and key heads don't depend on each other."""
        return site

    def install(self, model: nn.Module, site: Site, kernel: Kernel, spec: KernelSpec) -> Iterable[Change]:
        return replaced(model.get_submodule(site.path), _NAME, kernel)


def _prove(function: Function) -> Proof:
    reading = read_function(function)
    if reading.doubts:
        return Proof(None, reading.doubts[0])
    with probe.seeded():
        return first_fit(_candidates(function, reading), f"{_NAME} takes none of the variant's calls")


def _candidates(function: Function, reading: Reading) -> Iterator[Candidate]:
    evidence = f"{_NAME} gave the reference's values and gradients in each of its calls"
    rounding = "blocks whose scores are equal or differ by rounding alone, of which another may be chosen"
    branches = Branches(reading.codes, frozenset(), unwrap(function), is_helper=True)  # type: ignore[arg-type]
    miss = max(_miss(branches, function, call) for call in _CALLS)
    proof = Proof(_VARIANT, evidence, left_out={"": rounding})
    yield Candidate(f"{_NAME} is {_VARIANT}", miss, proof, branches)


@dataclass(frozen=True)
class _Call:
    """One call. A function may refuse an ``optional`` one: its model then never makes such a call."""

    tokens: int
    sizes: Sizes
    batch: int = 2
    dtype: torch.dtype = torch.float32
    lengths: tuple[int, ...] = ()
    own_window: bool = False
    scaling: float | None = None
    optional: bool = False

    def arguments(self) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """Random ones, all of which require gradients."""
        heads, groups, width, value_width = 6, 2, 8, 5
        count = sum(map(self.sizes.compressed, self.lengths or (self.tokens,)))
        keys, values = (self.tokens, groups, width), (self.tokens, groups, value_width)
        shapes = [(self.tokens, heads, width), keys, values, (count, groups, width), (count, groups, value_width)]
        drawn = [probe.random(self.batch, *shape, dtype=self.dtype) for shape in shapes]
        drawn.append(probe.random(self.batch, self.tokens, heads, 3).sigmoid().to(self.dtype))
        options: dict[str, Any] = asdict(self.sizes)
        if self.own_window:
            drawn += [probe.random(self.batch, *shape, dtype=self.dtype) for shape in (keys, values)]
        if self.lengths:
            options["cu_seq_lens"] = torch.tensor([0, *self.lengths]).cumsum(0).int()
        if self.scaling is not None:
            options["scaling"] = self.scaling
        return tuple(x.requires_grad_() for x in drawn), options


_SMALL = Sizes(
    compress_length=4, compress_stride=2, block_size=8, block_count=3, first_blocks=1, last_blocks=1, window=5
)
_CALLS = (
    _Call(45, _SMALL),
    _Call(53, Sizes(6, 3, 6, 4, 0, 2, 9), batch=1, scaling=0.4),
    _Call(3, _SMALL),  # no compressed key
    _Call(20, _SMALL, dtype=torch.bfloat16),  # every block is chosen, for choices of rounded scores differ
    _Call(45, _SMALL, own_window=True, optional=True),
    _Call(61, _SMALL, batch=1, lengths=(3, 1, 40, 17), optional=True),
)


def _miss(branches: Branches, function: Function, call: _Call) -> float:
    inputs: Any
    inputs, options = call.arguments()
    found, error = probe.attempt(partial(branches.run, partial(function, *inputs, **options)))
    if error or not isinstance(found, Tensor):
        return 0.0 if error and call.optional else float("inf")
    wanted = native_sparse(*inputs, **options)
    return probe.miss(found, wanted, inputs) if call.dtype is torch.float32 else probe.rounded_miss(found, wanted)
