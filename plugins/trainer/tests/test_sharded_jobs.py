"""Sharded jobs on real processes: they train as one process, resume under other sizes, and end when one is lost."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from jobs_on_ranks import BALANCE, STEPS, Jobs
from safetensors.torch import load_file
from sharded_jobs import Case
from transformers import AutoModelForCausalLM

from forked_processes import finish, fork_ranks, run_veomni
from veomni_core.errors import CheckpointError
from veomni_trainer.output.export import export_checkpoint

pytest.importorskip("transformers.distributed.expert_parallel", reason="transformers shards models since 5.21")
pytestmark = pytest.mark.thorough

AUTO = "model.ops_implementation={preset: auto}"
SDPA = "model.ops_implementation={preset: eager, attn_implementation: sdpa}"
ACCUMULATING = "train.gradient_accumulation=2"
HELD_OUT = "data.validation_fraction=0.1"


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    """The jobs, and three runs of one process: it takes the batches of several processes one after the other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    jobs = Jobs(tmp_path_factory.mktemp("sharded"))
    jobs.alone("llama alone", "llama", "train.batch_size=4", HELD_OUT)
    for batches in (2, 4):
        changes = (f"train.gradient_accumulation={batches}", BALANCE, "train.expert_loads=true")
        jobs.alone(f"moe alone, {batches} batches", "moe", *changes)
    yield jobs
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def two(jobs: Jobs) -> dict[int, list[str]]:
    """Runs of two processes; the errors of those that are refused."""
    half = f"llama, fsdp/checkpoint-{STEPS // 2}"
    fsdp, tp = ("train.fsdp_size=2",), ("train.tp_size=2",)
    return jobs.together(
        2,
        [
            jobs.case("llama, fsdp", "llama", *fsdp, HELD_OUT, f"train.save_every={STEPS // 2}"),
            jobs.case("llama, tp", "llama", *tp, "train.batch_size=4", HELD_OUT, AUTO),
            jobs.case("moe, fsdp", "moe", *fsdp, BALANCE, "train.gradient_checkpointing=true"),
            jobs.case("moe, ep", "moe", *fsdp, "train.ep_size=2", BALANCE, AUTO),
            jobs.case("moe, tp and ep", "moe", *tp, "train.ep_size=2", ACCUMULATING, BALANCE),
            jobs.case(
                "moe, sp and ep", "moe", *fsdp, "train.ep_size=2", "train.sp_size=2", SDPA, ACCUMULATING, BALANCE
            ),
            jobs.case("refused", "llama", "train.fsdp_size=4"),
            jobs.case(
                "bf16", "moe", *fsdp, "train.ep_size=2", BALANCE, AUTO, "train.precision=bf16_mixed", "train.steps=2"
            ),
            jobs.case("llama, on", "llama", *tp, "train.batch_size=4", HELD_OUT, continues=half, resume=True),
        ],
    )


@pytest.mark.parametrize("name", ["llama, fsdp", "llama, tp", "llama, on"])
def test_two_processes_train_as_one(jobs: Jobs, two: dict[int, list[str]], name: str) -> None:
    assert set(two) == {6}
    jobs.assert_same(name, "llama alone")


@pytest.mark.parametrize("name", ["moe, fsdp", "moe, ep", "moe, tp and ep", "moe, sp and ep"])
@pytest.mark.usefixtures("two")
def test_two_processes_train_experts_as_one(jobs: Jobs, name: str) -> None:
    jobs.assert_same(name, "moe alone, 2 batches")


@pytest.mark.usefixtures("two")
def test_under_autocast_losses_are_close(jobs: Jobs) -> None:
    wanted = [row["loss"] for row in jobs.rows("moe alone, 2 batches")[:2]]
    assert [row["loss"] for row in jobs.rows("bf16")] == pytest.approx(wanted, rel=1e-2)


def test_sizes_that_do_not_fill_the_processes_are_refused_with_the_command(two: dict[int, list[str]]) -> None:
    expected = "HostError: train.fsdp_size 4 x tp_size 1 need 4 processes, and this job has 2. Start it as `torchrun "
    assert all(error.startswith(f"{expected}--nproc_per_node=4 -m veomni_core.cli train") for error in two[6])


@pytest.mark.usefixtures("two")
def test_loads_do_not_depend_on_where_experts_are(jobs: Jobs) -> None:
    alone = jobs.rows("moe alone, 2 batches", "expert_rows")
    choices = 2 * 2 * 32 * 2  # micro-batches x sequences x tokens x choices
    assert {sum(layer) for row in alone for layer in row["rows"]} == {choices}
    for name in ("moe, ep", "moe, tp and ep", "moe, sp and ep"):
        assert jobs.rows(name, "expert_rows")[0] == alone[0]
        for row in jobs.rows(name):
            assert row["rank_load"] >= 1 and row["expert_load"] >= row["rank_load"]
            assert row["dispatch_bytes"] > 0
    for row in jobs.rows("moe, tp and ep"):  # all eager: float32 of width 32, there and back, in forward and backward
        rows = row["dispatch_bytes"] / (32 * 4) / 4
        assert rows < 2 * choices and rows.is_integer()
    assert "rank_load" not in jobs.rows("moe alone, 2 batches")[0]
    assert "expert_load" not in jobs.rows("moe, fsdp")[0]
    report = (jobs.run("moe, ep") / "report.html").read_text(encoding="utf-8")
    assert "Experts&#39; loads" in report and "Token dispatch" in report


@pytest.fixture(scope="module")
def four(jobs: Jobs) -> dict[int, list[str]]:
    """Four processes train with each expert on one of them, save, and go on under other sizes."""
    fsdp, mixed = ("train.fsdp_size=4", BALANCE), ("train.fsdp_size=2", "train.tp_size=2", BALANCE)
    half, last = f"saved/checkpoint-{STEPS // 2}", str(jobs.run(f"saved/checkpoint-{STEPS}"))
    return jobs.together(
        4,
        [
            jobs.case("mixed", "moe", *mixed, "train.ep_size=4", ACCUMULATING, AUTO),
            jobs.case("saved", "moe", *fsdp, "train.ep_size=4", f"train.save_every={STEPS // 2}", "train.export=true"),
            jobs.case("ep 2", "moe", *fsdp, "train.ep_size=2", continues=half, resume=True),
            jobs.case("ep 1", "moe", *fsdp, continues=half, resume=True),
            jobs.case("tp 2", "moe", *mixed, "train.ep_size=2", ACCUMULATING, continues=half, resume=True),
            jobs.case("more", "moe", *fsdp, "train.batch_size=4", continues=half, resume=True),
            jobs.case("wider", "moe", *fsdp, "model.config.hidden_size=64", continues=half, resume=True),
            *(
                Case(weights=last, plain=str(jobs.run("saved") / "model"), sizes=sizes)
                for sizes in ({"fsdp_size": 4, "ep_size": 4}, {"fsdp_size": 4}, {"fsdp_size": 2, "tp_size": 2})
            ),
        ],
    )


@pytest.mark.parametrize("name", ["mixed", "saved", "ep 2", "ep 1", "tp 2"])
def test_a_run_goes_on_under_other_sizes_as_if_it_had_not_stopped(
    jobs: Jobs, four: dict[int, list[str]], name: str
) -> None:
    assert set(four) == {5, 6}
    jobs.assert_same(name, "moe alone, 4 batches")


def test_a_checkpoint_that_does_not_fit_is_refused(four: dict[int, list[str]]) -> None:
    for error in four[5]:
        assert error.startswith("CheckpointError: ") and "was trained with 8 sequences per step" in error
        assert "this job takes 16. Change train.batch_size or gradient_accumulation" in error
    for error in four[6]:
        assert error.startswith("CheckpointError: ") and "does not fit this model: " in error and "32" in error
    assert len(four[5]) == len(four[6]) == 4


@pytest.mark.usefixtures("four")
def test_exported_weights_are_plain_and_those_of_the_checkpoint(jobs: Jobs, tmp_path: Path) -> None:
    exported = AutoModelForCausalLM.from_pretrained(jobs.run("saved") / "model")
    stored = AutoModelForCausalLM.from_pretrained(jobs.run(f"saved/checkpoint-{STEPS}")).state_dict()
    assert all(torch.equal(weight, stored[name]) for name, weight in exported.state_dict().items())
    exported.save_pretrained(tmp_path / "saved")  # it gives weights the names that they are published with
    assert {*_load(tmp_path / "saved")} == {*_load(jobs.run("saved") / "model")}
    shutil.rmtree(tmp_path / "saved")
    with pytest.raises(CheckpointError, match="holds no weights that can be exported"):
        export_checkpoint(jobs.run("saved"), tmp_path / "out")
    assert not [*tmp_path.iterdir()]


def _load(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def test_a_killed_process_ends_the_others_and_the_run_goes_on_in_one(jobs: Jobs) -> None:
    sizes = ("train.fsdp_size=2", "train.ep_size=2", BALANCE, "train.save_every=3", "train.timeout=60")
    case = jobs.case("killed", "moe", *sizes)
    sets = [part for change in case.changes for part in ("--set", change)]
    ranks = fork_ranks(run_veomni, "train", case.job, *sets, processes=2)
    ends = time.monotonic() + 120
    while not (jobs.run("killed") / "checkpoint-3").exists() and time.monotonic() < ends and ranks[0].is_running():
        time.sleep(0.05)
    ranks[1].send_signal(signal.SIGKILL)
    survivor, _ = finish(ranks, timeout=100)
    assert survivor.returncode == 1
    assert "error: another process of this job ended, or did not answer for 60 s (train.timeout)" in survivor.stderr
    assert not (jobs.run("killed") / ".incomplete").exists()
    jobs.alone("killed", "moe", ACCUMULATING, BALANCE, resume=True)
    jobs.assert_same("killed", "moe alone, 2 batches")
