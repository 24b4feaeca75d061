"""Refuses to apply a plan to another model than it was made for: the model's sites are found again, and compared."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from veomni_core.descriptions.sharding import WHOLE
from veomni_core.discovery.registry import Registry
from veomni_core.errors import PlanForAnotherModelError
from veomni_core.planning.plan import Plan
from veomni_core.sites.find import search
from veomni_core.sites.site import Site

_NAMED = 5
_COMPUTED_IN = ("float64", "float32", "bfloat16", "float16")  # weights of other dtypes are quantized


def refuse_another_model(model: nn.Module, plan: Plan, registry: Registry) -> None:
    """Raise unless each site that ``plan`` changes is in ``model`` as it was planned, and ``model`` has no others.

    Sites are proven anew, so that a setting, a class or a function that was replaced since shows, and a plan from a
    file can be compared too. Not compared are the device, the implementation that runs while nothing is bound, the
    dtype of weights that were quantized, and how FSDP divides parameters.

    Raises:
        PlanForAnotherModelError: they differ; the message has the sites, what was planned, and what is there.
    """
    found = search(model, registry)
    problems = list(_differences(plan, found.sites, registry))
    if not problems:
        return
    more = f"; and {len(problems) - _NAMED} more sites" if len(problems) > _NAMED else ""
    failed = "".join(f". Left out: {failure}" for failure in found.failed_rules)
    raise PlanForAnotherModelError(
        f"the plan is not for this {type(model).__name__}, which was not changed: {'; '.join(problems[:_NAMED])}{more}"
        f"{failed}. Call bind(model, config), or make_plan(model, config) as the model is now"
    )


def _differences(plan: Plan, found: tuple[Site, ...], registry: Registry) -> Iterator[str]:
    here: dict[tuple[str, ...], list[Site]] = {}
    for site in found:
        here.setdefault(_place(site), []).append(site)
    eager_too = {rule.name for rule in registry.site_rules if rule.installs_eager}
    planned = {op.op_name for op in plan.ops}
    for decision in plan.decisions:
        site, there = decision.site, here.pop(_place(decision.site), [])
        match = next((each for each in there if _proven(each, site) == _proven(site, each)), None)
        rest = [each for each in there if each is not (match or next(iter(there), None))]
        if rest:
            here[_place(site)] = rest
        if match is None and (decision.bound or (decision.as_asked and site.rule in eager_too)):
            yield _difference(site, there)
    for site in (site for sites in here.values() for site in sites):
        if site.variant is not None and site.op_name in planned:
            yield f"{_named(site)}: {site.op_name}/{site.variant} here, and the plan has no such site"


def _place(site: Site) -> tuple[str, ...]:
    return site.op_name, site.path, site.rule


def _proven(site: Site, other: Site) -> dict[tuple[str, str], Any]:
    """What a kernel at ``site`` rests on, as a plan's JSON has it."""
    dtype = None if {site.dtype, other.dtype} - {*_COMPUTED_IN} else site.dtype
    sharding = str(replace(site.sharding, fsdp=WHOLE.fsdp))
    own = {"variant": site.variant, "dtype": dtype, "needs": sorted(site.needs), "refuses": sorted(site.refuses)}
    every = {"": {**own, "sharding": sharding}, "detail": site.detail, "sizes": site.sizes}
    proven = {(kind, name): value for kind, values in every.items() for name, value in values.items()}
    return {key: json.loads(json.dumps(value, default=repr)) for key, value in proven.items()}


def _difference(planned: Site, there: list[Site]) -> str:
    where, wanted = _named(planned), f"{planned.op_name}/{planned.variant}"
    if not there:
        return f"{where}: planned as {wanted}, and this model has no such site"
    if there[0].variant is None:
        return f"{where}: planned as {wanted}, and here it is not proven: {there[0].evidence}"
    was, now = _proven(planned, there[0]), _proven(there[0], planned)
    differing = [key for key in {**was, **now} if was.get(key) != now.get(key)]
    return f"{where}: planned with {_listed(was, differing)}, and here it has {_listed(now, differing)}"


def _named(site: Site) -> str:
    return f"{site.op_name} at {site.path or 'the model'}"


def _listed(values: dict[tuple[str, str], Any], keys: list[tuple[str, str]]) -> str:
    """``variant offset, eps 1e-06``."""
    return ", ".join(f"{key[1]} {values.get(key, 'not stated')}" for key in keys)
