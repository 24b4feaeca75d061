"""Measures every kind of site of a model: the model's own code, and each kernel that is certified here."""

from __future__ import annotations

import datetime
import gc
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch

from veomni_conformance.bound_models.model_calls import undisturbed
from veomni_conformance.ledger import Ledger
from veomni_conformance.this_machine import CheckedKernel
from veomni_core.descriptions.kernel_spec import EAGER, KernelSpec
from veomni_core.errors import HostError
from veomni_core.planning.evidence import HERE
from veomni_core.sites.find import locator_of
from veomni_tools.profiles.measured_choice import checked_dtypes
from veomni_tools.profiles.measured_job import MeasuredJob, MeasuredOn
from veomni_tools.profiles.profile import Contender, MeasuredSite, Profile
from veomni_tools.tuning.clock import Clock, Turns, clock_for, times_in_turns
from veomni_tools.tuning.contenders import NotCalledError, SiteSteps
from veomni_tools.tuning.peak_memory import peak_bytes
from veomni_tools.tuning.step import Step
from veomni_tools.tuning.step_model import StepModel
from veomni_tools.tuning.survey import Survey, Surveyed

_LONGEST = 200  # characters of an error in a profile


@dataclass
class Tuning:
    """How a model is measured.

    Attributes:
        survey: finds its sites, and the kernels that could run there.
        turns: how often each contender is timed.
        clock: takes the times; by default that of the model's device.
        say: prints a line for each kind of site.
    """

    survey: Survey
    turns: Turns = field(default_factory=Turns)
    clock: Clock | None = None
    say: Callable[[str], None] = lambda words: None

    def profile(
        self, step_model: StepModel, surveyed: Iterable[Surveyed], job: MeasuredJob, unchecked: Mapping[KernelSpec, str]
    ) -> Profile:
        """Measure what is ``surveyed`` of the job's model, in the ``step_model`` that stands for it.

        Args:
            step_model: the model with few layers.
            surveyed: the kinds of sites of the whole model.
            job: what the profile is for.
            unchecked: kernels that have no certificate, each with the reason.

        Raises:
            HostError: not even one step of the model can be run on this device.
        """
        model = step_model.model
        here = {each.kind: each for each in self.survey.of(model)}
        ledger, known = Ledger.here(self.survey.hardware), dict[Hashable, tuple[Contender, ...]]()
        with undisturbed(model):
            step_model.model.train()
            _try_one_step(step_model, job)
            sites = []
            for each in surveyed:
                self.say(f"{each.kind}: {len(each.kernels)} kernels")
                at = replace(here[each.kind], count=each.count)
                sites.append(_Site(self, step_model, at, ledger, unchecked, known).measured())
                model.zero_grad()  # some kernels add to gradients in place
                _free(next(model.parameters()).device)  # what this kind recorded makes room for the next one
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        return Profile(job, MeasuredOn.here(ledger.machine), today, tuple(sites))


class _Site:
    """The measuring of one kind of site."""

    def __init__(
        self,
        tuning: Tuning,
        step_model: StepModel,
        surveyed: Surveyed,
        ledger: Ledger,
        unchecked: Mapping[KernelSpec, str],
        known: dict[Hashable, tuple[Contender, ...]],
    ) -> None:
        self._tuning, self._surveyed, self._known = tuning, surveyed, known
        self._registry = registry = tuning.survey.ops.registry
        self._ledger, self._unchecked = ledger, unchecked
        self._device = next(step_model.model.parameters()).device
        (rule,) = [rule for rule in registry.site_rules if rule.name == surveyed.site.rule]
        self._steps = SiteSteps(step_model, surveyed.site, locator_of(rule))
        self._why_not: dict[str, str] = {}
        self._checked: dict[str, tuple[CheckedKernel, ...]] = {}

    def measured(self) -> MeasuredSite:
        """Every contender, with its times or why there are none. Equal calls were measured before."""
        ready = {spec.name: spec for spec in self._surveyed.kernels if self._is_certified(spec)}
        steps: dict[str, Step] = {}
        own_problem = "no kernel that may be chosen could be run there"
        for name, spec in ready.items():
            try:
                kernel = spec.load()
                steps[name] = self._tried(self._steps.of_kernel(spec, kernel))
                if EAGER not in steps:
                    steps[EAGER] = self._tried(self._steps.of_own_code(spec, kernel))
            except Exception as error:
                problem = _in_words(error)
                if name in steps:
                    own_problem = problem
                else:
                    self._why_not[name] = problem
                _free(self._device)
        if EAGER not in steps:
            self._why_not[EAGER] = own_problem
        key = self._key(steps, ready)
        if key not in self._known:
            self._known[key] = self._taken(steps)
        contenders = [*self._known[key], *(Contender(name, why_not=why) for name, why in self._why_not.items())]
        named = (replace(each, checked=self._checked.get(each.kernel, ())) for each in contenders)
        shapes = next((step.shapes for step in steps.values()), "")
        return MeasuredSite(self._surveyed.kind, self._surveyed.count, self._steps.timed, shapes, tuple(named))

    def _is_certified(self, spec: KernelSpec) -> bool:
        dtypes, plugin = checked_dtypes(spec, self._surveyed.kind), self._registry.plugin_of(spec)
        standing = self._ledger.standing(spec, plugin, dtypes)
        if standing != HERE or not spec.backward:
            self._why_not[spec.name] = self._unchecked.get(spec, standing)
            return False
        self._checked[spec.name] = tuple(self._ledger.machine.checked(spec, plugin, dtype) for dtype in dtypes)
        return True

    def _tried(self, step: Step) -> Step:
        """``step``, which has run twice: what compiles, searches or allocates at first is over."""
        with step.in_place():
            step.run()
            step.run()
        return step

    def _key(self, steps: Mapping[str, Step], ready: Mapping[str, KernelSpec]) -> Hashable:
        """What the times depend on: the op, the contenders, and the form of the call."""
        kind = self._surveyed.kind
        forms = tuple((name, step.form) for name, step in sorted(steps.items()))
        return kind.op_name, kind.variant, tuple(sorted(ready)), forms

    def _taken(self, steps: Mapping[str, Step]) -> tuple[Contender, ...]:
        """The times and the memory of ``steps``; or of those that fail by now, why there are none."""
        memory: dict[str, int] = {}
        failed: list[Contender] = []
        for name, step in steps.items():
            try:
                with step.in_place():
                    memory[name] = peak_bytes(step.run, self._device)
            except Exception as error:
                failed.append(Contender(name, why_not=_in_words(error)))
                _free(self._device)
        able = {name: steps[name] for name in memory}
        try:
            times = times_in_turns(able, self._tuning.clock or clock_for(self._device), self._tuning.turns)
        except Exception as error:  # it has run three times before; whose it is can't be told from here
            why = f"one of {', '.join(able)} failed while they took turns: {_in_words(error)}"
            return (*failed, *(Contender(name, why_not=why) for name in able))
        return (*failed, *(Contender(name, times=times[name], peak_bytes=memory[name]) for name in able))


def _try_one_step(step_model: StepModel, job: MeasuredJob) -> None:
    try:
        step_model.run()
    except Exception as error:
        raise HostError(
            f"a step of {job} can't be run here, with as few layers as have every kind of site: {_in_words(error)}. "
            "Measure smaller steps, with --set train.batch_size=1 or a smaller data.sequence_length"
        ) from error


def _in_words(error: Exception) -> str:
    if isinstance(error, NotCalledError):
        return str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words[:_LONGEST]}"


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
