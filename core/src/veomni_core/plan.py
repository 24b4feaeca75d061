"""The frozen answer to "which kernel at which site, and why", from registry, config, hardware and sites alone."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from veomni_core.config import Choice, OpsConfig
from veomni_core.errors import KernelUnavailableError, NoSiteError
from veomni_core.hardware import Hardware, HardwareRequirement
from veomni_core.registry import Registry
from veomni_core.selection import Selection, Verdict
from veomni_core.sites.site import Site
from veomni_core.spec import EAGER, KernelSpec
from veomni_core.tables import render_table

DECLARED = "declared, not proven"


@dataclass(frozen=True)
class SiteDecision:
    """What runs at one site: a kernel's name or ``eager``, and why; ``as_asked`` if the config names just that."""

    site: Site
    kernel: str
    reason: str
    as_asked: bool = True

    @property
    def bound(self) -> bool:
        """Whether a kernel takes the place of the model's own code."""
        return self.kernel != EAGER

    @property
    def runs(self) -> str:
        """What runs at the site: a kernel, the eager code where it was asked for, else whatever the model is set to."""
        return self.kernel if self.bound or self.as_asked else self.site.own


@dataclass(frozen=True)
class OpDecision:
    """What one config field asked for, and what came of it at every site of its op."""

    op_name: str
    config_field: str
    asked: Any
    written: bool
    sites: tuple[SiteDecision, ...]

    @property
    def chosen(self) -> tuple[str, ...]:
        """The kernels that run somewhere, most sites first; ``eager`` alone where none does."""
        counts = Counter(decision.kernel for decision in self.sites if decision.bound)
        return tuple(name for name, _ in counts.most_common()) or (EAGER,)

    @property
    def left_eager(self) -> tuple[SiteDecision, ...]:
        """The sites where the model's own code runs."""
        return tuple(decision for decision in self.sites if not decision.bound)


@dataclass(frozen=True)
class PlannedKernel:
    """A kernel that the plan uses, and the plugin version that it is taken from."""

    spec: KernelSpec
    distribution: str
    version: str


@dataclass(frozen=True)
class Plan:
    """Frozen, and equal wherever registry, config, hardware and sites are equal.

    ``assumptions`` are requirements that could not be checked, because the hardware was named rather than detected.
    ``failed_rules`` are plugins' site rules that failed on the model: what they would have found is not in the plan.
    """

    hardware: Hardware
    ops: tuple[OpDecision, ...]
    kernels: tuple[PlannedKernel, ...]
    assumptions: tuple[str, ...] = ()
    failed_rules: tuple[str, ...] = ()

    def spec(self, op_name: str, variant: str | None, kernel: str) -> KernelSpec:
        """The spec of a kernel that the plan uses."""
        key = (op_name, variant, kernel)
        return next(planned.spec for planned in self.kernels if planned.spec.key == key)

    def to_json(self) -> str:
        """Everything in the plan, as JSON with sorted keys."""
        return json.dumps(asdict(self), sort_keys=True, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that :meth:`to_json` wrote."""
        data = json.loads(text)
        return cls(
            hardware=Hardware(**data["hardware"]),
            ops=tuple(_op_from_dict(op) for op in data["ops"]),
            kernels=tuple(
                PlannedKernel(
                    KernelSpec(**{**kernel["spec"], "hardware": HardwareRequirement(**kernel["spec"]["hardware"])}),
                    kernel["distribution"],
                    kernel["version"],
                )
                for kernel in data["kernels"]
            ),
            assumptions=tuple(data["assumptions"]),
            failed_rules=tuple(data.get("failed_rules", ())),
        )

    @property
    def sha256(self) -> str:
        """A hash of what runs where; reasons and the hardware's name don't enter it."""
        return hashlib.sha256(json.dumps(self._identity(), sort_keys=True).encode()).hexdigest()

    def diff(self, other: Plan) -> tuple[str, ...]:
        """What runs differently under ``other``, one sentence each; empty when the hashes are equal."""
        mine, theirs = self._identity(), other._identity()
        moves: dict[tuple[str, str, str], list[str]] = {}
        for key in sorted({*mine["sites"], *theirs["sites"]}):
            before, after = mine["sites"].get(key, "no site"), theirs["sites"].get(key, "no site")
            if before != after:
                op_name, path, *_ = key.split("|")
                moves.setdefault((op_name, before, after), []).append(path or "the model")
        sentences = [
            f"{op_name}: {before} -> {after} at {len(paths)} site(s): {', '.join(paths[:3])}{', …' * (len(paths) > 3)}"
            for (op_name, before, after), paths in moves.items()
        ]
        for key in sorted({*mine["kernels"]} & {*theirs["kernels"]}):
            before, after = mine["kernels"][key], theirs["kernels"][key]
            if before != after:
                sentences.append(f"{key}: {before} -> {after}")
        return tuple(sentences)

    def table(self) -> str:
        """What runs where, and why, one line per op and reason; below it what was assumed, and which rules failed."""
        rows = []
        for op in self.ops:
            groups = Counter((d.kernel, d.site.variant or "?", _why(d)) for d in op.sites)
            for (kernel, variant, reason), count in groups.items():
                rows.append((op.config_field, _shown(op), f"{op.op_name}/{variant}", kernel, str(count), reason))
            if not op.sites:
                rows.append((op.config_field, _shown(op), op.op_name, "-", "0", "the model has no such site"))
        title = f"Plan for {self.hardware.describe()}, sha256 {self.sha256[:12]}"
        table = render_table(("field", "asked", "op/variant", "kernel", "sites", "why"), rows, title)
        notes = [f"left out: {failure}" for failure in self.failed_rules]
        if self.assumptions:
            notes.append(f"assumed of {self.hardware.describe()}, since it is not this machine:")
            notes += [f"  {assumption}" for assumption in self.assumptions]
        return "\n".join([table, *notes])

    def _identity(self) -> dict[str, dict[str, str]]:
        return {
            "sites": {
                f"{op.op_name}|{decision.site.path}|{decision.site.rule}|{decision.site.variant}": decision.runs
                for op in self.ops
                for decision in op.sites
            },
            "kernels": {str(k.spec): f"{k.spec.factory} of {k.distribution} {k.version}" for k in self.kernels},
        }


def make_plan(
    model_or_sites: Any,
    config: OpsConfig | Mapping[str, Any],
    *,
    registry: Registry | None = None,
    hardware: Hardware | str | None = None,
) -> Plan:
    """Decide, for every site, which kernel runs there.

    ``model_or_sites`` is a model, or what :func:`find_sites` gave. ``hardware`` is what is here (detected) unless it
    is given, as a :class:`Hardware` or by name. With sites and named hardware, no torch is imported.

    Raises:
        KernelUnavailableError: a chosen kernel cannot run here; one message for all fields, each with its reasons and
            with what could be chosen instead.
        NoSiteError: a chosen kernel, or a module path in the config, that matches nothing in the model.
    """
    if not isinstance(config, OpsConfig):
        config = OpsConfig.from_dict(config, registry)
    registry = registry or config.registry
    if isinstance(hardware, str):
        hardware = registry.named_hardware(hardware)
    hardware = hardware or registry.detect_hardware()
    selection = Selection(registry, hardware, config.profile)
    sites, failed_rules = _sites(model_or_sites, registry)
    ops = tuple(_decide(op_name, config, selection, sites.get(op_name, ())) for op_name in sorted(config.choices))
    if config.backend != "hf":
        _raise_problems(ops, config, selection, failed_rules)
    kernels = tuple(_planned_kernels(ops, registry))
    return Plan(hardware, ops, kernels, () if hardware.detected else _assumptions(kernels), failed_rules)


def _sites(model_or_sites: Any, registry: Registry) -> tuple[dict[str, list[Site]], tuple[str, ...]]:
    """The sites by op, their variants canonical, and the plugins' rules that failed on the model."""
    failed_rules: tuple[str, ...] = ()
    if isinstance(model_or_sites, (tuple, list)):
        sites = [replace(s, variant=registry.canonical_variant(s.op_name, s.variant)) for s in model_or_sites]
    else:
        from veomni_core.sites.find import search

        found = search(model_or_sites, registry)
        sites, failed_rules = list(found.sites), found.failed_rules
    by_op: dict[str, list[Site]] = {}
    for site in sites:
        by_op.setdefault(site.op_name, []).append(site)
    return by_op, failed_rules


def _decide(op_name: str, config: OpsConfig, selection: Selection, sites: Iterable[Site]) -> OpDecision:
    choice = config.choices[op_name]
    decisions = []
    for site in sites:
        if config.backend == "hf":
            verdict = Verdict(EAGER, "MODELING_BACKEND=hf turns all binding off", as_asked=False)
        else:
            verdict = selection.choose(op_name, choice.names_for(site.path), site)
        decisions.append(SiteDecision(site, verdict.kernel, verdict.reason, verdict.as_asked))
    return OpDecision(op_name, choice.config_field, choice.asked, choice.written, tuple(decisions))


def _raise_problems(
    ops: tuple[OpDecision, ...], config: OpsConfig, selection: Selection, failed_rules: tuple[str, ...]
) -> None:
    """Raise for every explicit choice that came to nothing, all fields in one message.

    A choice without a site may have been for what a failed rule would have found; so those rules are named beside it.
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
    """The parts of a field that are answered on their own: ``(where, names, decisions)``."""
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


def _planned_kernels(ops: tuple[OpDecision, ...], registry: Registry) -> Iterable[PlannedKernel]:
    used = {(op.op_name, d.site.variant or "", d.kernel) for op in ops for d in op.sites if d.bound}
    for key in sorted(used):
        spec = registry.resolve(*key)
        plugin = registry.plugin_of(spec)
        yield PlannedKernel(spec, plugin.distribution, plugin.version)


def _assumptions(kernels: tuple[PlannedKernel, ...]) -> tuple[str, ...]:
    return tuple(f"{kernel.spec}: {package}" for kernel in kernels for package in kernel.spec.hardware.packages)


def _op_from_dict(data: dict[str, Any]) -> OpDecision:
    sites = tuple(SiteDecision(**{**d, "site": Site(**d["site"])}) for d in data["sites"])
    return OpDecision(**{**data, "sites": sites})


def _why(decision: SiteDecision) -> str:
    return f"{decision.reason}; {DECLARED}" if decision.bound and decision.site.declared else decision.reason


def _shown(op: OpDecision) -> str:
    return f"{op.asked}" + ("" if op.written else " (preset)")
