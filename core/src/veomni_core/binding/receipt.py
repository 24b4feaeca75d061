"""The receipt of a binding: per op what the config requests, what runs, and which sites stay eager, and why."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from veomni_core.descriptions.kernel_spec import EAGER
from veomni_core.planning.decisions import OpDecision
from veomni_core.planning.plan import DECLARED, Plan
from veomni_core.tables import render_table


@dataclass(frozen=True)
class Verification:
    """What ``verify=True`` checked, as sentences.

    Attributes:
        kernels: the kernels that passed their op's contract.
        sites: how many sites of each kernel agree with their module's own code.
        not_compared: the bound sites whose module could not be run on its own, and why.
    """

    kernels: tuple[str, ...] = ()
    sites: tuple[str, ...] = ()
    not_compared: tuple[str, ...] = ()


@dataclass(frozen=True)
class Receipt:
    """What one binding runs. ``str(receipt)`` is a table.

    Attributes:
        plan: the plan that was applied.
        verification: what ``verify=True`` checked; empty without it.
        transformations: ``(name, description)`` of each transformation in force in the model, in the order applied:
            the binding, and for example sequence parallelism.
        changed: by module path, which of their changes other code has overridden, so that a kernel no longer runs.
        misplaced: which kernel can't run on the device that the model is on now; empty if all can.
        not_called: by module path, why a kernel that was put there never runs.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from veomni_core import bind
        >>> shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        >>> model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=64))
        >>> binding = bind(model, {"preset": "eager", "rms_norm_implementation": "torch"}, device="cpu")
        >>> print(binding.receipt)
        Bound on cpu (CPU), plan ...
        ┏━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━┳━━━━━━━━━━━━━━━━━━━━━━┳━━━━━━━━┳━━━━━━━━━━━━━┳━━━━━━━━━━━━━━━━━━━━━┓
        ┃ field                             ┃ asked                ┃ chosen ┃ bound/found ┃ left eager, and why ┃
        ┡━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━╇━━━━━━━━━━━━━━━━━━━━━━╇━━━━━━━━╇━━━━━━━━━━━━━╇━━━━━━━━━━━━━━━━━━━━━┩
        │ attn_implementation               │ eager (preset eager) │ eager  │ 0/1         │ as asked (1)        │
        │ cross_entropy_loss_implementation │ eager (preset eager) │ eager  │ 0/1         │ as asked (1)        │
        │ rms_norm_implementation           │ torch                │ torch  │ 5/5         │                     │
        │ rotary_pos_emb_implementation     │ eager (preset eager) │ eager  │ 0/2         │ as asked (2)        │
        │ swiglu_mlp_implementation         │ eager (preset eager) │ eager  │ 0/2         │ as asked (2)        │
        └───────────────────────────────────┴──────────────────────┴────────┴─────────────┴─────────────────────┘
        >>> model.model.norm.forward = lambda hidden_states: hidden_states  # as a tool might do after bind
        >>> binding.receipt.changed
        {'model.norm': 'it was given a forward of its own, set to ...'}
    """

    plan: Plan
    verification: Verification = field(default_factory=Verification)
    transformations: tuple[tuple[str, str], ...] = ()
    changed: Mapping[str, str] = field(default_factory=dict)
    misplaced: str = ""
    not_called: Mapping[str, str] = field(default_factory=dict)

    @property
    def verified(self) -> tuple[str, ...]:
        """The kernels that passed their op's contract on this machine."""
        return self.verification.kernels

    @property
    def unverified(self) -> tuple[str, ...]:
        """The kernels that run because the config names them, and that no check on this machine has passed."""
        return () if self.verification.kernels else self.plan.unverified

    def to_dict(self) -> dict[str, Any]:
        """The receipt as plain data. ``ops`` has a mapping per op, whose ``eager`` lists the sites without a kernel."""
        return {
            "hardware": self.plan.hardware.describe(),
            "autocast": self.plan.autocast,
            "plan_sha256": self.plan.sha256,
            "assumptions": list(self.plan.assumptions),
            "left_out": list(self.plan.failed_rules),
            "passed_by": list(self.plan.passed_by),
            "unverified": list(self.unverified),
            "promises": list(self.plan.promises({*self.changed, *self.not_called})),
            "verified": list(self.verified),
            "verified_sites": list(self.verification.sites),
            "not_verified": list(self.verification.not_compared),
            "transformations": [{"name": name, "description": text} for name, text in self.transformations],
            "changed": dict(self.changed),
            "misplaced": self.misplaced,
            "not_called": dict(self.not_called),
            "kernels": [
                {
                    "kernel": str(kernel.spec),
                    "factory": kernel.spec.factory,
                    "options": dict(kernel.spec.settings),
                    "distribution": kernel.distribution,
                    "version": kernel.version,
                }
                for kernel in self.plan.kernels
            ],
            "ops": [{**_op_to_dict(op), "bound": self._bound(op)} for op in self.plan.ops],
        }

    def to_json(self) -> str:
        """:meth:`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=1)

    def table(self) -> str:
        """The receipt as text: one row per op that the model has or the config names."""
        rows = [
            (
                op.config_field,
                op.shown,
                ", ".join(op.chosen) if op.sites else "-",
                f"{self._bound(op)}/{len(op.sites)}" + (f" ({count} {DECLARED})" if (count := _declared(op)) else ""),
                "; ".join(f"{reason} ({len(paths)})" for reason, paths in self._reasons(op).items()),
            )
            for op in self.plan.ops
            if op.sites or op.written
        ]
        title = f"Bound on {self.plan.conditions}, plan {self.plan.sha256[:12]}"
        in_force = self.transformations if len(self.transformations) > 1 else ()  # a binding alone is in the first line
        notes = {
            "In force": [f"{name}: {description}" for name, description in in_force],
            "Not on its device": [self.misplaced] if self.misplaced else [],
            "Not proven": [what for op in self.plan.ops for what in op.left_out],
            "Left out": self.plan.failed_rules,
            "Passed by": self.plan.passed_by,
            "As asked": self.unverified,
            "Required": self.plan.promises({*self.changed, *self.not_called}),
            "Not verified": self.verification.not_compared,
            "Changed since": [f"{path}: {what}" for path, what in self.changed.items()],
        }
        lines = [title, *(f"{note}: {each}" for note, all_of_it in notes.items() for each in all_of_it)]
        columns = ("field", "asked", "chosen", "bound/found", "left eager, and why")
        return render_table(columns, rows, "\n".join(lines))

    def _bound(self, op: OpDecision) -> int:
        return sum(decision.bound and decision.site.path not in self.not_called for decision in op.sites)

    def _reasons(self, op: OpDecision) -> dict[str, list[str]]:
        """By reason, the sites at which no kernel of the op runs."""
        reasons: dict[str, list[str]] = {}
        for decision in op.left_eager:
            where = "" if decision.runs == EAGER else f"; the model is set to {decision.runs}"
            reasons.setdefault(decision.reason + where, []).append(decision.site.path)
        for path in (each.site.path for each in op.sites if each.bound and each.site.path in self.not_called):
            reasons.setdefault(self.not_called[path], []).append(path)
        return reasons

    def __str__(self) -> str:
        return self.table()


def kernels_line(plan: Plan) -> str:
    """The kernels of ``plan`` in one line: ``rms_norm/standard:torch at 5 sites; 7 sites eager``."""
    counts = Counter(str(each.spec) if each.bound else EAGER for each in plan.decisions)
    eager = counts.pop(EAGER, 0)
    kernels = ", ".join(f"{spec} at {count} site{'s' * (count != 1)}" for spec, count in counts.items()) or "no kernel"
    return f"{kernels}; {eager} site{'s' * (eager != 1)} eager"


def _op_to_dict(op: OpDecision) -> dict[str, Any]:
    return {
        "field": op.config_field,
        "op": op.op_name,
        "asked": op.asked,
        "written": op.written,
        "preset": op.preset,
        "chosen": list(op.chosen) if op.sites else [],
        "found": len(op.sites),
        "declared": _declared(op),
        "left_out": list(op.left_out),
        "eager": [{"path": each.site.path, "runs": each.runs, "reason": each.reason} for each in op.left_eager],
    }


def _declared(op: OpDecision) -> int:
    """How many bound sites have a variant that was declared by modeling code or a plugin's rule, not proven."""
    return sum(decision.bound and decision.site.declared for decision in op.sites)
