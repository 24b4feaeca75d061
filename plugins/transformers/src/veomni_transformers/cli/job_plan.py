"""A job's plan without its weights: what ``veomni plan`` prints and ``veomni lock`` writes down."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from veomni_core.descriptions.hardware import Hardware
from veomni_core.descriptions.references import load_attribute
from veomni_core.discovery.registry import Registry
from veomni_core.errors import JobFileError, VeOmniError
from veomni_core.jobs.jobfile import load_yaml
from veomni_core.planning.config import OpsConfig
from veomni_transformers.jobs.assignments import assigned, read_assignments
from veomni_transformers.jobs.job_conditions import JobConditions
from veomni_transformers.jobs.job_model import ModelSection, model_section_of
from veomni_transformers.veomni_jobs import warn_of_removed_variables

if TYPE_CHECKING:
    from veomni_core.planning.plan import Plan


@dataclass(frozen=True)
class CheckedJob:
    """A job that its trainer would accept, ready to be planned.

    Attributes:
        section: the job's ``model``.
        config: the kernels that it chooses.
        conditions: under which it would run.
        hardware: where.
    """

    section: ModelSection
    config: OpsConfig
    conditions: JobConditions
    hardware: Hardware

    def skeleton(self) -> Any:
        """The job's model on the meta device. Weights in a folder are looked for first."""
        from veomni_transformers.build import build_skeleton
        from veomni_transformers.jobs.model_config import load_model_config
        from veomni_transformers.weights import check_weights

        assumed = bool(self._assumed()) and isinstance(self.section.config, dict)
        section = self.section if assumed else self.section.located()
        # Weights of a Hub id may be downloaded by the training alone.
        if section.weights is not None and section.weights == self.section.weights and not self._assumed():
            check_weights(Path(section.weights))
        dtype = self.conditions.dtype or section.dtype or "bfloat16"
        trusted = section.trust_remote_code
        config = load_model_config(section.source, trust_remote_code=trusted)
        if self.conditions.vocabulary is not None:
            config.get_text_config().vocab_size = self.conditions.vocabulary
        if self.conditions.architecture is not None:
            config.architectures = [self.conditions.architecture]
        modeling = self.section.modeling
        return build_skeleton(config, torch_dtype=dtype, trust_remote_code=trusted, modeling=modeling)

    def plan(self) -> Plan:
        """The job's plan."""
        from veomni_core.planning.planner import make_plan

        plan = make_plan(
            self.skeleton(),
            self.config,
            hardware=self.hardware,
            autocast=self.conditions.autocast,
            distributed_config=self.conditions.distributed_config,
            batch=self.conditions.batch,
        )
        return replace(plan, assumptions=(*plan.assumptions, *self._assumed()))

    def _assumed(self) -> tuple[str, ...]:
        """The weights, if they are not here and the plan is for another machine."""
        weights = self.section.weights
        missing = weights is not None and not self.hardware.detected and not Path(weights).exists()
        return (f"model.weights: {weights}",) if missing else ()


def checked_job(job: Path, changes: Sequence[str], hardware: str | None, registry: Registry) -> CheckedJob:
    """Read the job in the file ``job`` and check it as the command that runs it would.

    Args:
        job: the job's file.
        changes: the values of ``--set``.
        hardware: the name of the hardware to plan for; ``None`` for this machine's.
        registry: the plugins.

    Raises:
        VeOmniError: what that command would raise.
    """
    written, assignments = load_yaml(job), read_assignments(changes)
    # Before torch is imported: a broken device library may make that fail, and the device's plugin can say why.
    target = registry.named_hardware(hardware) if hardware else registry.detect_hardware()
    sections = dict.fromkeys([*map(str, written), *(each.parts[0] for each in assignments)])
    others = [name for name in sections if name != "model"]
    conditions = _conditions(others, job, list(changes), registry, target)
    data = assigned(written, assignments)
    if conditions.device and not hardware:
        target = registry.detect_hardware(conditions.device)
    section = model_section_of(data, str(job), job.parent)
    warn_of_removed_variables(os.environ)
    chosen = conditions.ops_implementation or section.ops_implementation
    config = OpsConfig.from_dict({"model": {"ops_implementation": chosen}}, registry)
    return CheckedJob(section, config, conditions, target)


def _conditions(
    others: list[str], job: Path, changes: list[str], registry: Registry, target: Hardware
) -> JobConditions:
    """The conditions under which a plugin's subcommand would run this job; raises what that subcommand would raise.

    A job with only a ``model`` section is not checked.

    Args:
        others: the job's sections besides ``model``.
        job: its file.
        changes: the values of ``--set``.
        registry: where the subcommands are found.
    """
    if not others:
        return JobConditions()
    problems: dict[str, VeOmniError] = {}
    verbs = [command for command in registry.commands.values() if command.job_check]
    for verb in verbs:
        check = load_attribute(verb.job_check)
        try:
            return (check(job, target, changes=changes) if changes else check(job, target)) or JobConditions()
        except VeOmniError as error:
            problems[verb.name] = error
    if not verbs:
        sections = ", ".join(others)
        print(f"not checked: {sections}. No installed plugin runs jobs; install veomni-trainer", file=sys.stderr)
    elif len(problems) == 1:
        raise next(iter(problems.values()))
    else:
        raise JobFileError("\n".join(f"veomni {verb}: {error}" for verb, error in problems.items()))
    return JobConditions()
