"""A profile of a job is found by ``veomni plan`` and by training: both know its model and the shape of its steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from veomni_conformance.ledger import Certificate, record
from veomni_conformance.this_machine import ThisMachine
from veomni_core import Hardware, binding_of, discover
from veomni_tools.profiles.measured_job import MeasuredJob, MeasuredOn
from veomni_tools.profiles.profile import Contender, MeasuredSite, Profile, Times
from veomni_tools.profiles.profile_store import write_profile
from veomni_tools.tuning.survey import Survey
from veomni_trainer.job.load import load_job
from veomni_trainer.setup.conditions import conditions, ops_config, with_machine_defaults
from veomni_trainer.setup.model import build_skeleton, job_tokenizer
from veomni_transformers.cli.job_plan import checked_job

CPU = Hardware.cpu()
CONFIG = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
JOB = {
    "model": {"config": {**CONFIG, "num_attention_heads": 4}, "ops_implementation": {"preset": "auto"}},
    "data": {"files": "text.txt", "tokenizer": "bytes", "sequence_length": 16},
    "train": {"output_dir": "run", "steps": 1, "batch_size": 2, "device": "cpu", "save_every": "never"},
}


@pytest.fixture
def path(tmp_path):
    (tmp_path / "text.txt").write_text("some text\n" * 100)
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(JOB))
    return file


def measured_for(path: Path) -> Profile:
    """A profile in which the model's own norms are the fastest; by rank, those of ``torch`` are taken."""
    registry = discover({})
    job = checked_job(path, (), None, registry)
    model, machine, plugin = job.skeleton(), ThisMachine(CPU), registry.plugin("veomni-torch")
    sites = []
    for each in Survey(job.config, CPU, None).of(model):
        if each.kind.op_name == "rms_norm":
            (spec,) = [kernel for kernel in each.kernels if kernel.name == "torch"]
            checked = machine.checked(spec, plugin, "float32")
            record([Certificate.of_today(checked, {"one": (0.0, 0.0)})], {})
            own, torch = (
                Contender("eager", times=Times(1.0, 1.0, 1.0)),
                Contender("torch", (checked,), Times(2.0, 2.0, 2.0)),
            )
            sites.append(MeasuredSite(each.kind, each.count, "a norm", "", (own, torch)))
    job_of = MeasuredJob.of(model, job.conditions.batch, None)
    profile = Profile(job_of, MeasuredOn.here(machine), "2026-11-24", tuple(sites))
    write_profile(profile)
    return profile


def norms(plan):
    return {site.kernel for op in plan.ops if op.op_name == "rms_norm" for site in op.sites}


def test_plan_and_train_go_by_the_same_profile(path):
    before = checked_job(path, (), None, discover({})).plan()
    assert norms(before) == {"torch"} and before.profile == ""
    profile = measured_for(path)
    plan = checked_job(path, (), None, discover({})).plan()
    job = with_machine_defaults(load_job(path), CPU)
    trained = binding_of(build_skeleton(job, ops_config(job), job_tokenizer(job))).plan
    assert norms(plan) == norms(trained) == {"eager"}
    assert plan.profile == trained.profile == profile.digest and plan.sha256 == trained.sha256


def test_another_batch_is_planned_by_rank_and_says_so(path):
    measured_for(path)
    plan = checked_job(path, ["train.batch_size=1"], None, discover({})).plan()
    (reason,) = {site.reason for op in plan.ops if op.op_name == "rms_norm" for site in op.sites}
    assert norms(plan) == {"torch"}
    assert reason.endswith("; not measured for 1 x 16 tokens on cpu (CPU), but for 2 x 16 tokens on cpu (CPU)")


@pytest.mark.parametrize(
    "changes", [["data.packing=true"], ["train.sp_size=2"], ["train.fsdp_size=2", "train.device=cuda"]], ids=str
)
def test_steps_of_other_forms_have_no_shape_to_look_up(path, changes):
    assert conditions(with_machine_defaults(load_job(path, changes), CPU)).batch is None


def test_a_job_that_names_a_gpu_says_that_it_needs_one(path):
    for changes, needed in ([], False), (["train.device=cuda"], True):
        assert conditions(with_machine_defaults(load_job(path, changes), CPU)).needs_accelerator is needed
