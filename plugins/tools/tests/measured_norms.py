"""A norm that was measured: its kernels, profiles of their times, and the plans that they lead to."""

from __future__ import annotations

from planned_norms import kernel, registry
from veomni_conformance.ledger import Certificate, record
from veomni_conformance.this_machine import ThisMachine
from veomni_core import Hardware, OpsConfig, Site
from veomni_core.planning.planner import _plan
from veomni_tools.profiles.measured_choice import MeasuredChoices
from veomni_tools.profiles.measured_job import MeasuredJob, MeasuredOn
from veomni_tools.profiles.profile import Contender, MeasuredSite, Profile, Times
from veomni_tools.profiles.profile_store import write_profile
from veomni_tools.profiles.site_kind import SiteKind

CPU, H200 = Hardware.cpu(), Hardware("cuda", 90, "NVIDIA H200", detected=True)
NORM = Site("rms_norm", "model.layers.3.norm", "norm modules", "standard", "proven", "bfloat16", sizes={"width": (64,)})
KIND = SiteKind.of(NORM, ("bfloat16",))
ACME, PLAIN, SHY = kernel("acme", preference=60), kernel("plain", preference=10), kernel("shy", preference=0)
REGISTRY = registry(ACME, PLAIN, SHY)
JOB = MeasuredJob("llama", "0" * 64, (4, 128))


def checked(spec, of=REGISTRY, hardware=CPU):
    return ThisMachine(hardware).checked(spec, of.plugin("p"), "bfloat16")


def certify(*specs, hardware=CPU):
    record([Certificate.of_today(checked(spec, hardware=hardware), {"one": (0.1, 0.1)}) for spec in specs], {})


def times(median, spread=0.01):
    return Times(median, median - spread, median + spread)


def contender(spec, median, memory=100, spread=0.01, **more):
    return Contender(spec.name, (checked(spec, **more),), times(median, spread), memory)


OWN = Contender("eager", times=times(5.0), peak_bytes=100)


def measured(*contenders, job=JOB, kind=KIND, machine=None, hardware=CPU):
    site = MeasuredSite(kind, 7, "LlamaRMSNorm at model.layers.0.norm", "[4, 128, 64] bfloat16", contenders)
    profile = Profile(job, machine or MeasuredOn.here(ThisMachine(hardware)), "2026-11-24", (site,))
    write_profile(profile)
    return profile


def planned(value="auto", job=JOB, hardware=CPU, sites=(NORM,), of=REGISTRY, training=True, **settings):
    fields = {"preset": "eager", "rms_norm_implementation": value, **settings}
    config = OpsConfig.from_dict(fields, of, environ={})

    def times(registry, hardware, evidence):
        return MeasuredChoices(job, registry, evidence) if hardware.detected else None

    return _plan(sites, (), config, hardware, job.autocast if job else None, training, times if job else None)


def chosen(plan):
    (decision,) = [each for op in plan.ops if op.op_name == "rms_norm" for each in op.sites]
    return decision.kernel


def reason(plan):
    (decision,) = [each for op in plan.ops if op.op_name == "rms_norm" for each in op.sites]
    return decision.reason


BY_RANK = "the highest preference (60) of 2 usable here"
