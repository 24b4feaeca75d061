"""The plan: which kernel runs at which site, and why. It depends on registry, config, hardware and sites only."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from veomni_core.descriptions.hardware import Hardware, HardwareRequirement
from veomni_core.descriptions.spec import EAGER, KernelSpec
from veomni_core.discovery.registry import Registry
from veomni_core.errors import UnknownNameError, did_you_mean
from veomni_core.planning.config import OpsConfig
from veomni_core.planning.decisions import OpDecision, SiteDecision
from veomni_core.planning.plan_problems import raise_problems
from veomni_core.planning.selection import AUTOCAST_DTYPES, Selection, Verdict
from veomni_core.sites.site import Site
from veomni_core.tables import render_table

DECLARED = "declared, not proven"


@dataclass(frozen=True)
class PlannedKernel:
    """A kernel that the plan uses, and the distribution and version that it comes from."""

    spec: KernelSpec
    distribution: str
    version: str


@dataclass(frozen=True)
class Plan:
    """Which kernel runs at each site of a model. Equal registries, configs, hardware and sites give equal plans.

    Attributes:
        hardware: the hardware that the plan is for.
        ops: the decisions, per op and site.
        kernels: the kernels that are used somewhere.
        assumptions: requirements that could not be checked, because the hardware was named rather than detected.
        failed_rules: plugins' site rules that raised on the model. Sites that they would have found are missing.
        autocast: the dtype of the ``torch.autocast`` that training uses; ``None`` for training without it.
    """

    hardware: Hardware
    ops: tuple[OpDecision, ...]
    kernels: tuple[PlannedKernel, ...]
    assumptions: tuple[str, ...] = ()
    failed_rules: tuple[str, ...] = ()
    autocast: str | None = None

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
            ops=tuple(OpDecision.from_dict(op) for op in data["ops"]),
            kernels=tuple(
                PlannedKernel(
                    KernelSpec(
                        **{**kernel["spec"], "hardware": HardwareRequirement.from_dict(kernel["spec"]["hardware"])}
                    ),
                    kernel["distribution"],
                    kernel["version"],
                )
                for kernel in data["kernels"]
            ),
            assumptions=tuple(data["assumptions"]),
            failed_rules=tuple(data.get("failed_rules", ())),
            autocast=data.get("autocast"),
        )

    @property
    def sha256(self) -> str:
        """A hash of what runs where, and of the autocast dtype. It leaves out the reasons and the hardware's name."""
        return hashlib.sha256(json.dumps(self._identity(), sort_keys=True).encode()).hexdigest()

    def diff(self, other: Plan) -> tuple[str, ...]:
        """What runs differently under the plan ``other``, one sentence each; empty if the hashes are equal."""
        mine, theirs = self._identity(), other._identity()
        moves: dict[tuple[str, str, str], list[str]] = {}
        for key in sorted({*mine["sites"], *theirs["sites"]}):
            before, after = mine["sites"].get(key, "no site"), theirs["sites"].get(key, "no site")
            if before != after:
                op_name, path, *_ = key.split("|")
                moves.setdefault((op_name, before, after), []).append(path or "the model")
        sentences = []
        if self.autocast != other.autocast:
            sentences.append(f"autocast: {self.autocast or 'off'} -> {other.autocast or 'off'}")
        sentences += [
            f"{op_name}: {before} -> {after} at {len(paths)} site(s): {', '.join(paths[:3])}{', …' * (len(paths) > 3)}"
            for (op_name, before, after), paths in moves.items()
        ]
        for key in sorted({*mine["kernels"]} & {*theirs["kernels"]}):
            before, after = mine["kernels"][key], theirs["kernels"][key]
            if before != after:
                sentences.append(f"{key}: {before} -> {after}")
        return tuple(sentences)

    @property
    def conditions(self) -> str:
        """For messages: the hardware, and the autocast dtype if there is one."""
        return self.hardware.describe() + (f" under autocast to {self.autocast}" if self.autocast else "")

    def table(self) -> str:
        """The plan as text: one row per op, kernel and reason, then the failed rules and the assumptions."""
        rows = []
        for op in self.ops:
            groups = Counter((d.kernel, _what(op, d), _why(d)) for d in op.sites)
            for (kernel, what, reason), count in groups.items():
                rows.append((op.config_field, _shown(op), what, kernel, str(count), reason))
            if not op.sites:
                rows.append((op.config_field, _shown(op), op.op_name, "-", "0", "the model has no such site"))
        title = f"Plan for {self.conditions}, sha256 {self.sha256[:12]}"
        table = render_table(("field", "asked", "op/variant, dtype", "kernel", "sites", "why"), rows, title)
        notes = [f"left out: {failure}" for failure in self.failed_rules]
        if self.assumptions:
            notes.append(f"assumed of {self.hardware.describe()}, since it is not this machine:")
            notes += [f"  {assumption}" for assumption in self.assumptions]
        return "\n".join([table, *notes])

    def _identity(self) -> dict[str, dict[str, str]]:
        autocast = {"autocast": {"dtype": self.autocast}} if self.autocast else {}
        return {
            **autocast,
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
    autocast: Any = None,
) -> Plan:
    """Decide for every site which kernel runs there. Changes nothing in the model.

    Does not import torch if it is given sites and the name of the hardware.

    Args:
        model_or_sites: a model (the meta device will do), or the result of :func:`veomni_core.find_sites`.
        config: the config, checked or as a mapping (``{"preset": "auto"}``).
        registry: the plugins to choose from; the config's without it.
        hardware: the hardware to plan for, or its name (``"h200"``). Without it, the hardware of this machine.
        autocast: the dtype of the ``torch.autocast`` that training will use (``"bfloat16"``, ``"float16"`` or the
            torch dtype); ``None`` for training without it.

    Raises:
        UnknownNameError: PyTorch can't autocast to ``autocast``.
        KernelUnavailableError: a requested kernel cannot run here. One message covers all fields, each with the reasons
            and the kernels that could be used instead.
        NoSiteError: the model has no site for a requested kernel, or no module at a path that the config names.
    """
    if not isinstance(config, OpsConfig):
        config = OpsConfig.from_dict(config, registry)
    registry = registry or config.registry
    if isinstance(hardware, str):
        hardware = registry.named_hardware(hardware)
    hardware = hardware or registry.detect_hardware()
    autocast = _autocast_name(autocast)
    selection = Selection(registry, hardware, config.profile, autocast)
    sites, failed_rules = _sites(model_or_sites, registry)
    ops = tuple(_decide(op_name, config, selection, sites.get(op_name, ())) for op_name in sorted(config.choices))
    if config.backend != "hf":
        raise_problems(ops, config, selection, failed_rules)
    kernels = tuple(_planned_kernels(ops, registry))
    return Plan(
        hardware, ops, kernels, () if hardware.detected else _assumptions(kernels, hardware), failed_rules, autocast
    )


def _autocast_name(autocast: Any) -> str | None:
    """The dtype's name in configs. ``torch.bfloat16`` is recognised by its ``str``, so torch need not be imported."""
    if autocast is None:
        return None
    name = str(autocast).removeprefix("torch.")
    if name not in AUTOCAST_DTYPES:
        raise UnknownNameError(f"autocast: {name!r} is unknown. {did_you_mean(name, AUTOCAST_DTYPES)}")
    return name


def _sites(model_or_sites: Any, registry: Registry) -> tuple[dict[str, list[Site]], tuple[str, ...]]:
    """The sites by op, with variant aliases resolved, and the plugins' site rules that failed on the model."""
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
        dtypes = selection.dtypes_at(op_name, site)
        decisions.append(SiteDecision(site, verdict.kernel, verdict.reason, verdict.as_asked, dtypes))
    return OpDecision(op_name, choice.config_field, choice.asked, choice.written, tuple(decisions))


def _planned_kernels(ops: tuple[OpDecision, ...], registry: Registry) -> Iterable[PlannedKernel]:
    used = {(op.op_name, d.site.variant or "", d.kernel) for op in ops for d in op.sites if d.bound}
    for key in sorted(used):
        spec = registry.resolve(*key)
        plugin = registry.plugin_of(spec)
        yield PlannedKernel(spec, plugin.distribution, plugin.version)


def _assumptions(kernels: tuple[PlannedKernel, ...], hardware: Hardware) -> tuple[str, ...]:
    return tuple(
        f"{kernel.spec}: {package}"
        for kernel in kernels
        for package in kernel.spec.hardware.chosen_for(hardware).packages
    )


def _what(op: OpDecision, decision: SiteDecision) -> str:
    """The op and variant, and on a second line the dtypes of the site's inputs."""
    return "\n".join([f"{op.op_name}/{decision.site.variant or '?'}", *filter(None, [" or ".join(decision.dtypes)])])


def _why(decision: SiteDecision) -> str:
    return f"{decision.reason}; {DECLARED}" if decision.bound and decision.site.declared else decision.reason


def _shown(op: OpDecision) -> str:
    return f"{op.asked}" + ("" if op.written else " (preset)")
