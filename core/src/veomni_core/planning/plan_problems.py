"""Collects the requests of a config that can't be met, and raises one error for all fields."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from veomni_core.errors import KernelUnavailableError, NoSiteError
from veomni_core.planning.choice import Choice, Group
from veomni_core.planning.config import OpsConfig
from veomni_core.planning.decisions import OpDecision, SiteDecision
from veomni_core.planning.selection import Selection

logger = logging.getLogger(__name__)


def raise_problems(
    ops: tuple[OpDecision, ...], config: OpsConfig, selection: Selection, failed_rules: tuple[str, ...]
) -> None:
    """Raise one error for all requests that can't be met; warn of fields in ``allow_unused`` that have no site.

    Where a requested kernel has no site, a failed site rule might have found one. So the message names those rules too.

    Raises:
        KernelUnavailableError: a requested kernel can't run here, or at none of its sites.
        NoSiteError: all that is wrong is that requested kernels or module paths match nothing in the model.
    """
    pressing: list[str] = []
    others: list[str] = []
    siteless: list[str] = []
    allowed: list[str] = []
    for op in ops:
        for group, decisions in _decided(op, config.choices[op.op_name]):
            field = op.config_field if group.glob is None else f"{op.config_field}[{group.glob!r}]"
            missing = allowed if not op.sites and op.config_field in config.allow_unused else siteless
            if group.glob is not None and not decisions:
                paths = ", ".join(decision.site.path for decision in op.sites[:4]) + ", …" * (len(op.sites) > 4)
                elsewhere = f"no {op.op_name} site has such a path; sites are at {paths}"
                missing.append(f"{field}: {elsewhere if op.sites else _no_site(op)}")
            elif selection.leaves_open(group.requested):
                continue
            elif problem := selection.unavailable(op.op_name, group.requested):
                (pressing if op.written or decisions else others).append(f"{field}: {problem}")
            elif op.written and not decisions:
                missing.append(f"{field}: {' or '.join(group.names)} was chosen, but {_no_site(op)}")
            elif op.written and not any(decision.bound for decision in decisions):
                reasons = "; ".join(dict.fromkeys(decision.reason for decision in decisions))
                names = " or ".join(group.names)
                pressing.append(f"{field}: {names} covers none of the {len(decisions)} sites: {reasons}")
    if pressing:
        raise KernelUnavailableError("\n".join([*pressing, *others, *siteless, *(failed_rules if siteless else ())]))
    if siteless:
        raise NoSiteError("\n".join([*siteless, *failed_rules]))
    for unused in allowed:
        logger.warning("allow_unused: %s", unused.partition(";")[0])


def _decided(op: OpDecision, choice: Choice) -> Iterable[tuple[Group, tuple[SiteDecision, ...]]]:
    """The groups of a field with their decisions, the default first. It is left out where globs match every site."""
    *globs, default = choice.groups
    for group in (default, *globs):
        decisions = tuple(decision for decision in op.sites if decision.glob == group.glob)
        if decisions or not globs or group is not default:
            yield group, decisions


def _no_site(op: OpDecision) -> str:
    return f"the model has no {op.op_name} site; remove the field, write eager, or list it in allow_unused"
