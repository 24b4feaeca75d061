"""The plan: which kernel runs at which site, and why; its hash, its JSON, its table, and how two plans differ."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from veomni_core.descriptions.field_types import from_data
from veomni_core.descriptions.hardware import Hardware
from veomni_core.descriptions.kernel_spec import KernelSpec
from veomni_core.descriptions.sharding import WHOLE
from veomni_core.planning.config import VERIFIED
from veomni_core.planning.decisions import OpDecision, SiteDecision
from veomni_core.tables import fit, render_table

if TYPE_CHECKING:  # planning from sites alone imports no torch
    from veomni_core.sites.proven_model import ProvenModel

DECLARED = "declared, not proven"


@dataclass(frozen=True)
class PlannedKernel:
    """A kernel that the plan uses.

    Attributes:
        distribution, version: where it comes from.
        standing: whether it is certified on this machine, in the dtypes of its sites: ``certified here``, ``never
            verified here``, or ``verified elsewhere:`` and where. Empty in a plan for a machine that is not here.
    """

    spec: KernelSpec
    distribution: str
    version: str
    standing: str = ""


@dataclass(frozen=True)
class Plan:
    """Which kernel runs at each site of a model. Equal registries, configs, hardware and sites give equal plans.

    Attributes:
        hardware: the hardware that the plan is for.
        ops: the decisions, per op and site.
        kernels: the kernels of these decisions, each once.
        assumptions: requirements that could not be checked, because the hardware was named rather than detected.
        failed_rules: plugins that failed, and site rules that raised on the model: what they offer is missing.
        autocast: the dtype of the ``torch.autocast`` that training uses; ``None`` for training without it.
        training: whether it is for training; False for evaluation only.
        passed_by: kernels that were not chosen for what was found of them on this machine, and what: a check that
            failed or is lacking, or an import.
        profile: the short hash of the profile of ``veomni tune`` by which ``auto`` chose; empty if it did nowhere.
        profile_notes: where that profile is, and where it did not count, why.
        unverified: kernels that the config names, of plugins that the op's own does not name, and that passed no check
            here; each with the command that checks it.
        overrides: which of torch's operators this process has replaced or given back
            (``torch.backends.python_native``); empty where it changed nothing, and for named hardware.
        require: what the config required of every kernel.
        proven: the model that it was made for, as long as this process knows it; neither compared nor in the JSON.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from veomni_core import make_plan
        >>> shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        >>> model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=64))
        >>> plan = make_plan(model, {"preset": "eager", "swiglu_mlp_implementation": "torch"}, hardware="cpu")
        >>> [decision.kernel for op in plan.ops if op.op_name == "swiglu_mlp" for decision in op.sites]
        ['torch', 'torch']
        >>> make_plan(model, {"preset": "eager"}, hardware="cpu").diff(plan)[0]
        'swiglu_mlp: eager -> torch at 2 site(s): model.layers.0.mlp, model.layers.1.mlp'
        >>> Plan.from_json(plan.to_json()).sha256 == plan.sha256
        True
    """

    hardware: Hardware
    ops: tuple[OpDecision, ...]
    kernels: tuple[PlannedKernel, ...]
    assumptions: tuple[str, ...] = ()
    failed_rules: tuple[str, ...] = ()
    autocast: str | None = None
    training: bool = True
    passed_by: tuple[str, ...] = ()
    profile: str = ""
    profile_notes: tuple[str, ...] = ()
    unverified: tuple[str, ...] = ()
    overrides: str = ""
    require: tuple[str, ...] = ()
    proven: ProvenModel | None = field(default=None, compare=False, repr=False)

    def to_json(self) -> str:
        """Everything in the plan, as JSON with sorted keys."""
        data = {each.name: getattr(self, each.name) for each in fields(self) if each.compare}
        data["hardware"] = asdict(self.hardware)
        data["ops"] = [op.to_dict() for op in self.ops]
        data["kernels"] = [asdict(kernel) for kernel in self.kernels]
        return json.dumps(data, sort_keys=True, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that :meth:`to_json` wrote."""
        data = json.loads(text)
        kernels = tuple(from_data(PlannedKernel, kernel) for kernel in data["kernels"])
        specs = {(*kernel.spec.key[:2], kernel.spec.label): kernel.spec for kernel in kernels}
        hardware, ops = Hardware(**data["hardware"]), tuple(OpDecision.from_dict(op, specs) for op in data["ops"])
        rest: dict[str, Any] = {each.name: data[each.name] for each in fields(cls)[3:] if each.name in data}
        rest = {name: tuple(value) if isinstance(value, list) else value for name, value in rest.items()}
        return cls(hardware, ops, kernels, **rest)

    @property
    def decisions(self) -> Iterator[SiteDecision]:
        """The decisions about all sites, op by op."""
        return (decision for op in self.ops for decision in op.sites)

    @property
    def sha256(self) -> str:
        """A hash of what runs where, the autocast dtype and the use; without the reasons and the hardware's name."""
        return hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()

    def diff(self, other: Plan) -> tuple[str, ...]:
        """What runs differently under the plan ``other``, one sentence each; empty if the hashes are equal."""
        mine, theirs = self.identity(), other.identity()
        moves: dict[tuple[str, str, str], list[str]] = {}
        for key in sorted({*mine["sites"], *theirs["sites"]}):
            before, after = mine["sites"].get(key, "no site"), theirs["sites"].get(key, "no site")
            if before != after:
                op_name, path, *_ = key.split("|")
                moves.setdefault((op_name, before, after), []).append(path or "the model")
        sentences = []
        if self.autocast != other.autocast:
            sentences.append(f"autocast: {self.autocast or 'off'} -> {other.autocast or 'off'}")
        if self.overrides != other.overrides:
            sentences.append(f"torch's operators: {self.overrides or 'its own'} -> {other.overrides or 'its own'}")
        if self.training != other.training:
            sentences.append(f"for {self.use} -> for {other.use}")
        sentences += [
            f"{op_name}: {before} -> {after} at {len(paths)} site(s): {', '.join(paths[:3])}{', …' * (len(paths) > 3)}"
            for (op_name, before, after), paths in moves.items()
        ]
        for key in sorted({*mine["kernels"]} & {*theirs["kernels"]}):
            before, after = mine["kernels"][key], theirs["kernels"][key]
            if before != after:
                sentences.append(f"{key}: {before} -> {after}")
        if sentences and self.profile != other.profile:
            sentences.append(f"auto went by profile: {self.profile or 'none'} -> {other.profile or 'none'}")
        return tuple(sentences)

    @property
    def use(self) -> str:
        """What the plan is for: ``training`` or ``evaluation``."""
        return "training" if self.training else "evaluation"

    @property
    def conditions(self) -> str:
        """For messages: the hardware, the autocast dtype if there is one, and the use if it is not training."""
        autocast = f" under autocast to {self.autocast}" if self.autocast else ""
        return f"{self.hardware.describe()}{autocast}{'' if self.training else ' for evaluation'}"

    def table(self, everything: bool = False) -> str:
        """The plan as text: one row per op, kernel and reason, then the failed rules and the assumptions.

        Fields that a preset fills and that the model has no site for are only counted, unless ``everything`` is true.
        """
        rows: list[tuple[str, ...]] = []
        hidden = [op.op_name for op in self.ops if not (op.sites or op.written or everything)]
        presets = " and ".join(dict.fromkeys(f"preset {op.preset}" for op in self.ops if not op.written))
        for op in self.ops:
            declared = f"; {DECLARED}"
            groups = Counter(
                (d.kernel, _what(d), d.reason + declared * (d.bound and d.site.declared)) for d in op.sites
            )
            asked = str(op.asked) if op.written else "(preset)"
            for (kernel, what, reason), count in groups.items():
                rows.append((op.config_field, asked, what, kernel, str(count), reason))
            if not op.sites and op.op_name not in hidden:
                rows.append((op.config_field, asked, "-", "-", "0", "the model has no such site"))
        title = ", ".join(filter(None, [f"Plan for {self.conditions}", presets, f"sha256 {self.sha256[:12]}"]))
        columns = ["field", "asked", "variant, dtype", "kernel", "sites", "why"]
        if not any(op.written for op in self.ops):  # then the title says it
            columns.remove("asked")
            rows = [(row[0], *row[2:]) for row in rows]
        table = render_table(columns, rows, title)
        standings = sorted({kernel.standing for kernel in self.kernels} - {""})
        notes = [
            *([f"no site for {len(hidden)} other ops; --all lists them"] if hidden else []),
            *(f"left out: {failure}" for failure in self.failed_rules),
            *(f"not proven: {what}" for op in self.ops for what in op.left_out),
            *self.profile_notes,
            *(f"passed by: {kernel}" for kernel in self.passed_by),
            *(f"as asked: {kernel}" for kernel in self.unverified),
            *self.promises(),
            *(f"{how}: {', '.join(str(k.spec) for k in self.kernels if k.standing == how)}" for how in standings),
        ]
        if self.overrides:
            notes.append(f"torch's operators in this process: {self.overrides}")
        if self.assumptions:
            notes.append(f"assumed of {self.hardware.describe()}, since it is not this machine:")
            notes += [f"  {assumption}" for assumption in self.assumptions]
        return "\n".join([table, *map(fit, notes)])

    def promises(self, not_running: Collection[str] = ()) -> tuple[str, ...]:
        """For each promise that was required: how many sites' kernels make it, and run (not those ``not_running``); and
        what is not known to hold."""
        sentences = []
        for promise in (each for each in self.require if each != VERIFIED):
            word, rest = promise.replace("_", "-"), Counter[str]()
            for each in self.decisions:
                kept = getattr(each.spec, promise, False) and each.site.path not in not_running
                rest["" if kept else f"{each.site.op_name}:{each.runs}"] += 1
            sentences.append(f"{word}: the kernels at {rest.pop('', 0)} sites promise it")
            unknown = [*(f"{what} ({count})" for what, count in rest.items()), "code outside of sites"]
            sentences.append(f"not known to be {word}: {', '.join(unknown)}")
        return tuple(sentences)

    def identity(self) -> dict[str, dict[str, str]]:
        """What is hashed: ``sites`` says what runs at each ``op|path|rule|variant``, ``kernels`` whose code that is."""
        autocast = {"autocast": {"dtype": self.autocast}} if self.autocast else {}
        use = {} if self.training else {"use": {"for": self.use}}
        overrides = {"torch": {"overrides": self.overrides}} if self.overrides else {}
        return {
            **autocast,
            **use,
            **overrides,
            "sites": {
                f"{op.op_name}|{decision.site.path}|{decision.site.rule}|{decision.site.variant}": decision.runs
                + ("" if decision.site.sharding == WHOLE else f" ({decision.site.sharding})")
                for op in self.ops
                for decision in op.sites
            },
            "kernels": {str(k.spec): f"{k.spec.factory} of {k.distribution} {k.version}" for k in self.kernels},
        }


def _what(decision: SiteDecision) -> str:
    """The variant and the dtypes of the site's inputs, and on a further line how its parameters are divided."""
    sharding = "" if decision.site.sharding == WHOLE else str(decision.site.sharding)
    kind = ", ".join(filter(None, [decision.site.variant or "?", " or ".join(decision.dtypes)]))
    return "\n".join(filter(None, [kind, sharding]))
