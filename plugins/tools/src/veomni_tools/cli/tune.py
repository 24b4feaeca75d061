"""``veomni tune JOB.yaml``: measures the kernels of a job at its model's own shapes, and has ``auto`` go by that."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Sequence
from json import loads
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from veomni_core.cli.output import AsJson, Changes, JobPath, print_json
from veomni_core.descriptions.kernel_spec import KernelSpec
from veomni_core.discovery.discover import discover
from veomni_core.errors import ConfigError, HostError
from veomni_tools.cli.missing_checks import MissingChecks
from veomni_transformers.cli.job_plan import CheckedJob, checked_job

if TYPE_CHECKING:
    from veomni_tools.profiles.profile import Profile
    from veomni_tools.tuning.report import Outcome


def tune(
    job: JobPath,
    changes: Changes = None,
    jobs: Annotated[int, typer.Option(help="How many missing checks of kernels run at a time.", min=1)] = 1,
    timeout: Annotated[float, typer.Option(help="Seconds that one check may take.")] = 600.0,
    slow: Annotated[bool, typer.Option("--slow", help="Also check kernels whose check takes many minutes.")] = False,
    seconds: Annotated[float, typer.Option(help="Seconds of turns for each kind of site.", min=0.0)] = 3.0,
    json: AsJson = False,
) -> None:
    """Measure every kernel that could run in the job's model, at its own shapes, on this machine; write a profile.

    Kernels that are not certified here are checked first. From then on `auto` goes by the profile, where it holds.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # torch's profiler, which counts memory, speaks for itself else
    start = time.monotonic()

    def say(words: str) -> None:
        typer.echo(f"{time.monotonic() - start:4.0f} s  {words}", err=True)

    checked = checked_job(job, changes or (), None, discover())
    _refuse_what_is_not_measured(checked, str(job))
    checks = MissingChecks(checked.config.registry, checked.hardware, jobs, timeout, slow, say)
    profile, found = _measured(checked, checks, seconds, say)

    from veomni_tools.profiles.profile_store import write_profile
    from veomni_tools.tuning.picture import picture
    from veomni_tools.tuning.report import table

    file = write_profile(profile)
    drawn = file.with_suffix(".svg")
    _write(drawn, picture(profile, found))
    if json:
        print_json({"profile": str(file), "picture": str(drawn), "digest": profile.digest, **_as_data(profile, found)})
        return
    print(table(profile, found))
    print(f"{file} is written: auto goes by it (profile {profile.digest}). The picture: {drawn}")


def _measured(
    checked: CheckedJob, checks: MissingChecks, seconds: float, say: Callable[[str], None]
) -> tuple[Profile, tuple[Outcome, ...]]:
    """Build what is measured, check what may not be measured yet, and measure the rest."""
    from veomni_tools.profiles.measured_choice import checked_dtypes
    from veomni_tools.profiles.measured_job import MeasuredJob
    from veomni_tools.tuning.clock import Turns
    from veomni_tools.tuning.measure import Tuning
    from veomni_tools.tuning.report import outcomes
    from veomni_tools.tuning.shallow import shallow_model
    from veomni_tools.tuning.step_model import StepModel
    from veomni_tools.tuning.survey import Survey

    conditions, device = checked.conditions, checked.hardware.torch_device_type
    assert conditions.batch is not None  # it was refused otherwise
    skeleton, autocast = checked.skeleton(), conditions.autocast
    survey = Survey(checked.config, checked.hardware, autocast)
    surveyed = survey.of(skeleton)
    say(f"{sum(each.count for each in surveyed)} sites of {len(surveyed)} kinds")
    needed: dict[KernelSpec, dict[str, None]] = {}
    for each in surveyed:
        for spec in each.kernels:
            needed.setdefault(spec, {}).update(dict.fromkeys(checked_dtypes(spec, each.kind)))
    unchecked = checks.run((spec, tuple(dtypes)) for spec, dtypes in needed.items())
    options = {"trust_remote_code": checked.section.trust_remote_code, "modeling": checked.section.modeling}
    model: Any = shallow_model(skeleton, surveyed, survey, device, **options)
    say(f"a model of {model.config.get_text_config().num_hidden_layers} layers has every kind of site")
    job = MeasuredJob.of(skeleton, conditions.batch, autocast)
    assert job is not None  # a model of a job has a config
    step_model = StepModel.of(model, conditions.batch, autocast)
    # Garbage is collected after each kind of site. Going through all that was imported took half a second each time.
    gc.collect()
    gc.freeze()
    profile = Tuning(survey, Turns(seconds=seconds), say=say).profile(step_model, surveyed, job, unchecked)
    say("measured")
    by_rank = {each.kind: survey.by_rank(each) for each in surveyed}
    never_taken = {str(spec) for spec in needed if spec.preference <= 0}
    return profile, outcomes(profile, by_rank, never_taken)


def _refuse_what_is_not_measured(checked: CheckedJob, job: str) -> None:
    """Raise where there is nothing to measure, or not here.

    Raises:
        HostError: the job names an accelerator, and this machine has none.
        ConfigError: the job's steps have no shape that is measured.
    """
    if checked.conditions.needs_accelerator and checked.hardware.device_type == "cpu":
        raise HostError(
            f"{job} names a GPU (train.device), but this machine has {checked.hardware.describe()}: run veomni tune on "
            "the machine that trains, or with --set train.device=cpu for the times of this CPU"
        )
    if checked.conditions.batch is None:
        raise ConfigError(
            f"{job} has no steps that veomni tune measures: those of one device, with train.batch_size sequences of "
            "data.sequence_length tokens. Packed sequences, adapters, TRL's methods, and models or sequences that "
            "processes share are not measured; nor is a job with a section model alone"
        )


def _as_data(profile: Profile, found: Sequence[Outcome]) -> dict[str, Any]:
    """Who won at each kind of site, and all that was measured, as plain data."""
    return {
        "chosen": {str(each.site.kind): each.chosen.kernel if each.chosen else None for each in found},
        "by_rank": {str(each.site.kind): each.by_rank for each in found},
        "says": {str(each.site.kind): each.sentence() for each in found},
        "measured": loads(profile.to_json()),
    }


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise HostError(f"{path} can't be written: {error}") from error
