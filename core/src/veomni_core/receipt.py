"""What was bound: per op the field, what it asked for, what runs, and every site left eager with its reason."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from veomni_core.decisions import OpDecision
from veomni_core.plan import DECLARED, Plan
from veomni_core.spec import EAGER
from veomni_core.tables import render_table


@dataclass(frozen=True)
class Verification:
    """What ``verify=True`` found: kernels held against their contract, sites compared with their module's own code.

    ``not_compared`` names, with the reason, each bound site whose module could not be run.
    """

    kernels: tuple[str, ...] = ()
    sites: tuple[str, ...] = ()
    not_compared: tuple[str, ...] = ()


@dataclass(frozen=True)
class Receipt:
    """The account of one binding.

    ``verification`` says what was run here before binding. ``sequence_parallel`` says how the
    attention runs over several ranks, and is empty where it doesn't. ``changed`` says, by module path, why a bound site
    does not run its kernel any more. ``misplaced`` says which kernels need the model on another device than it is on
    now, and is empty where none does.
    """

    plan: Plan
    verification: Verification = field(default_factory=Verification)
    sequence_parallel: str = ""
    changed: Mapping[str, str] = field(default_factory=dict)
    misplaced: str = ""

    @property
    def verified(self) -> tuple[str, ...]:
        """The kernels that were run against their contract here."""
        return self.verification.kernels

    def to_dict(self) -> dict[str, Any]:
        """Plain data; ``ops`` lists one mapping per op, with ``eager`` naming each site that no kernel took."""
        return {
            "hardware": self.plan.hardware.describe(),
            "autocast": self.plan.autocast,
            "plan_sha256": self.plan.sha256,
            "assumptions": list(self.plan.assumptions),
            "verified": list(self.verified),
            "verified_sites": list(self.verification.sites),
            "not_verified": list(self.verification.not_compared),
            "sequence_parallel": self.sequence_parallel,
            "changed": dict(self.changed),
            "misplaced": self.misplaced,
            "kernels": [
                {"kernel": str(k.spec), "factory": k.spec.factory, "distribution": k.distribution, "version": k.version}
                for k in self.plan.kernels
            ],
            "ops": [_op_to_dict(op) for op in self.plan.ops],
        }

    def to_json(self) -> str:
        """:meth:`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=1)

    def table(self) -> str:
        """One line per op that the model has, or that the config names."""
        rows = [
            (
                op.config_field,
                f"{op.asked}" + ("" if op.written else " (preset)"),
                ", ".join(op.chosen) if op.sites else "-",
                f"{_bound(op)}/{len(op.sites)}" + (f" ({count} {DECLARED})" if (count := _declared(op)) else ""),
                "; ".join(f"{reason} ({len(paths)})" for reason, paths in _eager_reasons(op).items()),
            )
            for op in self.plan.ops
            if op.sites or op.written
        ]
        title = f"Bound on {self.plan.conditions}, plan {self.plan.sha256[:12]}"
        if self.sequence_parallel:
            title += f"\nThe attention runs sequence-parallel: {self.sequence_parallel}"
        if self.misplaced:
            title += f"\nNot on its device: {self.misplaced}"
        for what in self.verification.not_compared:
            title += f"\nNot verified: {what}"
        for path, what in self.changed.items():
            title += f"\nChanged since: {path}: {what}"
        return render_table(("field", "asked", "chosen", "bound/found", "left eager, and why"), rows, title)

    def __str__(self) -> str:
        return self.table()


def _op_to_dict(op: OpDecision) -> dict[str, Any]:
    return {
        "field": op.config_field,
        "op": op.op_name,
        "asked": op.asked,
        "written": op.written,
        "chosen": list(op.chosen) if op.sites else [],
        "bound": _bound(op),
        "found": len(op.sites),
        "declared": _declared(op),
        "eager": [
            {"path": decision.site.path, "runs": decision.runs, "reason": decision.reason} for decision in op.left_eager
        ],
    }


def _bound(op: OpDecision) -> int:
    return sum(decision.bound for decision in op.sites)


def _declared(op: OpDecision) -> int:
    """How many bound sites have their variant by their author's word."""
    return sum(decision.bound and decision.site.declared for decision in op.sites)


def _eager_reasons(op: OpDecision) -> dict[str, list[str]]:
    reasons: dict[str, list[str]] = {}
    for decision in op.left_eager:
        where = "" if decision.runs == EAGER else f"; {decision.runs} runs there, as the model is set to"
        reasons.setdefault(decision.reason + where, []).append(decision.site.path)
    return reasons
