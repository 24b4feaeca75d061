"""Finds the sites whose kernels make a job's run leave the all-eager one: first the ops, then their modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import transformers

from veomni_trainer.bisect.runs import Difference, KernelSite, Runs

Part = TypeVar("Part")
Differs = Callable[[tuple[Part, ...]], bool]


@dataclass(frozen=True)
class Causes:
    """What makes a job's run leave the all-eager one.

    Attributes:
        steps, tolerance: how far the runs were compared, and the relative difference of losses that is rounding.
        whole: where the job's own run leaves the all-eager one; ``None`` if it doesn't.
        causes: groups of sites; each makes a run leave it with kernels nowhere else.
        runs: how many runs were made.
    """

    steps: int
    tolerance: float
    whole: Difference | None
    causes: tuple[tuple[KernelSite, ...], ...]
    runs: int

    def describe(self) -> str:
        """The text for the terminal."""
        if self.whole is None:
            return (
                f"The job and the same job all-eager agree in {self.steps} step(s). If they part later, raise --steps; "
                "to find less than that, lower --tolerance"
            )
        lines = [f"Found in {self.runs} runs:"]
        for cause in self.causes:
            sites = "\n  ".join(map(str, cause))
            lines.append(f"  {sites}" + ("\n  (only together)" if len(cause) > 1 else ""))
        fields = ", ".join(dict.fromkeys(site.field for cause in self.causes for site in cause))
        lines.append(f"Name another kernel or eager there (in {fields}), and report the kernel to its plugin")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        groups = [
            [{"field": site.field, "kernel": str(site.spec), "path": site.path} for site in cause]
            for cause in self.causes
        ]
        whole = None if self.whole is None else vars(self.whole)
        return {"steps": self.steps, "tolerance": self.tolerance, "differs": whole, "causes": groups, "runs": self.runs}


def find_causes(
    job: Path, changes: Sequence[str], steps: int, tolerance: float | None, say: Callable[[str], None]
) -> Causes:
    """Train the job's first steps with kernels at ever fewer of its sites, until those that matter are left.

    Args:
        job: the job's file.
        changes: the values of ``--set``.
        steps, tolerance: as of :class:`~veomni_trainer.bisect.runs.Runs`.
        say: prints a line for each run.

    Raises:
        VeOmniError: what training the job would raise.
    """
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    runs = Runs(job, changes, steps, tolerance)
    made, whole = 2, runs.difference()
    say(
        f"{job} with kernels at {len(runs.sites)} sites, against the same job all-eager: {steps} steps, losses equal "
        f"up to {runs.tolerance:g}"
    )
    say(f"  all sites: {whole or 'agrees'}")
    if whole is None:
        return Causes(steps, runs.tolerance, None, (), made)

    def differs(sites: Sequence[KernelSite]) -> bool:
        nonlocal made
        made += 1
        found = runs.difference(sites)
        say(f"  {_name(sites)}: {found or 'agrees'}")
        return found is not None

    by_field: dict[str, list[KernelSite]] = {}
    for site in runs.sites:
        by_field.setdefault(site.field, []).append(site)
    groups = [sites for sites in by_field.values() if len(by_field) == 1 or differs(sites)]
    if groups:
        found = [cause for sites in groups for cause in causes(sites, differs)]
    else:  # no op does it alone
        ops = together(list(by_field.values()), (), lambda some: differs([site for sites in some for site in sites]))
        found = [together([site for sites in ops for site in sites], (), differs)]
    return Causes(steps, runs.tolerance, whole, tuple(found), made)


def _name(sites: Sequence[KernelSite]) -> str:
    kernels = ", ".join(dict.fromkeys(str(site.spec) for site in sites))
    if len(sites) == 1:
        return str(sites[0])
    return f"{kernels} at {len(sites)} sites, {sites[0].path or 'the model'} to {sites[-1].path or 'the model'}"


def causes(parts: Sequence[Part], differs: Differs[Part]) -> list[tuple[Part, ...]]:
    """Smallest groups of ``parts`` that make a run differ, if all of them together do.

    A part that makes it differ by itself is a group of one, and each such part is found. Where none does in a half and
    in the other half, the parts of one group that do so only together are found.

    Args:
        parts: what can be on, in an order in which neighbours are alike.
        differs: whether a run with only these parts on differs. ``differs(parts)`` must hold. About
            ``2 n log2(len(parts))`` runs are made for n causes.

    Example:
        >>> causes(range(100), lambda on: 7 in on or 93 in on)
        [(7,), (93,)]
        >>> causes(range(100), lambda on: {7, 93} <= {*on})
        [(7, 93)]
    """
    if len(parts) == 1:
        return [tuple(parts)]
    found = [cause for half in _halves(parts) if differs(half) for cause in causes(half, differs)]
    return found or [together(parts, (), differs)]


def together(parts: Sequence[Part], on: tuple[Part, ...], differs: Differs[Part]) -> tuple[Part, ...]:
    """A smallest group of ``parts`` that makes a run differ in which ``on`` are on too, if all ``parts`` do.

    This is Zeller's delta debugging: where neither half suffices, the parts of each are found with the other one on.
    """
    if len(parts) == 1:
        return tuple(parts)
    first, second = _halves(parts)
    for half in (first, second):
        if differs((*on, *half)):
            return together(half, on, differs)
    return (*together(first, (*on, *second), differs), *together(second, (*on, *first), differs))


def _halves(parts: Sequence[Part]) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
    middle = (len(parts) + 1) // 2
    return tuple(parts[:middle]), tuple(parts[middle:])
