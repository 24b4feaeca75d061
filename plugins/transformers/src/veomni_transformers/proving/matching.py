"""Compares what a module's code gave with each variant: the one that fits is proven, else the nearest is named."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from veomni_core.descriptions.kernel_spec import EAGER
from veomni_transformers.proving.branches import Branches
from veomni_transformers.proving.proof import KEPT_APART, Proof


@dataclass(frozen=True)
class Candidate:
    """One variant, or one layout of it, that a module's results were compared with.

    Attributes:
        name: what the evidence calls it.
        miss: how far the results are from it; 0.0 where they agree, and infinite where it can't take the same calls.
        proof: the answer if it fits.
        branches: what ran in the calls that were compared.
    """

    name: str
    miss: float
    proof: Proof
    branches: Branches


def standard_mixer(name: str, miss: float, runs: str, branches: Branches) -> Candidate:
    """The standard variant of a delta rule or a scan, as the function ``name``; ``runs`` is what the model runs."""
    evidence = f"{name} gave the reference's values and gradients in each of its calls"
    evidence += f"; in its place the model would run {runs}" * (runs != EAGER)
    return Candidate(f"{name} is standard", miss, Proof("standard", evidence, left_out=KEPT_APART), branches)


def first_fit(candidates: Iterable[Candidate], none_takes_it: str) -> Proof:
    """The proof of the first candidate that fits; the candidates after it are not computed.

    If none fits, the evidence names the nearest one. If none could even take the calls, it is ``none_takes_it``.
    """
    misses = []
    for candidate in candidates:
        if candidate.miss == 0.0:
            return if_every_branch_ran(candidate.proof, candidate.name, candidate.branches)
        misses.append((candidate.miss, candidate.name))
    by_how_much, nearest = min(misses)
    if by_how_much == float("inf"):
        return Proof(None, none_takes_it)
    return Proof(None, f"no variant fits; the nearest, {nearest}, misses by {by_how_much:.2%}")


def if_every_branch_ran(proof: Proof, name: str, branches: Branches) -> Proof:
    """``proof``, or a refusal of it if the code has a branch that never ran in the calls that were compared."""
    open_choice = branches.never_run()
    return Proof(None, f"{name} wherever it was run, but {open_choice}") if open_choice else proof
