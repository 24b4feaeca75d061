"""Collects the requests of a config that can't be met, and raises one error for all fields."""

from __future__ import annotations

from collections.abc import Iterable

from veomni_core.errors import KernelUnavailableError, NoSiteError
from veomni_core.planning.config import Choice, OpsConfig
from veomni_core.planning.decisions import OpDecision, SiteDecision
from veomni_core.planning.selection import Selection


def raise_problems(
    ops: tuple[OpDecision, ...], config: OpsConfig, selection: Selection, failed_rules: tuple[str, ...]
) -> None:
    """Raise one error for all requests that can't be met.

    Where a requested kernel has no site, a failed site rule might have found one. So the message names those rules too.

    Raises:
        KernelUnavailableError: a requested kernel can't run here, or at none of its sites.
        NoSiteError: all that is wrong is that requested kernels or module paths match nothing in the model.
    """
    pressing: list[str] = []
    others: list[str] = []
    siteless: list[str] = []
    for op in ops:
        for where, names, decisions in _groups(op, config.choices[op.op_name]):
            if selection.leaves_open(names):
                continue
            field = f"{op.config_field}{where}"
            if problem := selection.unavailable(op.op_name, names):
                (pressing if op.written or decisions else others).append(f"{field}: {problem}")
            elif op.written and not decisions:
                siteless.append(f"{field}: {' or '.join(names)} was chosen, but {_nothing_there(op, where)}")
            elif op.written and not any(decision.bound for decision in decisions):
                reasons = "; ".join(dict.fromkeys(decision.reason for decision in decisions))
                pressing.append(f"{field}: {' or '.join(names)} covers none of the {len(decisions)} sites: {reasons}")
        siteless += [f"{op.config_field}[{glob!r}]: {_nothing_there(op, glob)}" for glob in _idle_globs(op, config)]
    if pressing:
        raise KernelUnavailableError("\n".join([*pressing, *others, *siteless, *(failed_rules if siteless else ())]))
    if siteless:
        raise NoSiteError("\n".join([*siteless, *failed_rules]))


def _groups(op: OpDecision, choice: Choice) -> Iterable[tuple[str, tuple[str, ...], tuple[SiteDecision, ...]]]:
    """The parts of a field, by glob, as ``(where, names, decisions)``; ``where`` is empty for the field's default."""
    rest = tuple(decision for decision in op.sites if choice.glob_for(decision.site.path) is None)
    if rest or not choice.per_module:
        yield "", choice.default, rest
    for glob, names in choice.per_module:
        decisions = tuple(decision for decision in op.sites if choice.glob_for(decision.site.path) == glob)
        if decisions:
            yield f"[{glob!r}]", names, decisions


def _idle_globs(op: OpDecision, config: OpsConfig) -> list[str]:
    choice = config.choices[op.op_name]
    used = {choice.glob_for(decision.site.path) for decision in op.sites}
    return [glob for glob, _ in choice.per_module if glob not in used]


def _nothing_there(op: OpDecision, where: str) -> str:
    if where and op.sites:
        paths = ", ".join(decision.site.path for decision in op.sites[:4])
        return f"no {op.op_name} site has such a path; sites are at {paths}{', …' * (len(op.sites) > 4)}"
    return f"the model has no {op.op_name} site; remove the field, or write eager"
