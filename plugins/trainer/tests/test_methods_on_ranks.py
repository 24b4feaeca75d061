"""Methods on two processes: with a copy of the model each, and over a model that FSDP2 shards."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from post_training import EXAMPLES, needs_examples
from sharded_jobs import Case, run_cases

from forked_processes import finish, fork_ranks
from veomni_trainer.job.load import load_job
from veomni_trainer.run.run_job import run_job

pytest.importorskip("transformers.distributed.expert_parallel", reason="transformers shards models since 5.21")
pytestmark = [needs_examples, pytest.mark.thorough]

COPIES = ("kto", "reward", "classify")
LORA = ("lora={rank: 4}",)
SHARDED: dict[str, tuple[str, tuple[str, ...]]] = {
    "eager": ("sft", ("model.ops_implementation={preset: eager}",)),
    "kernels": ("sft", ()),
    "adapter": ("sft", LORA),
    **{f"{each} sharded": (each, ("train.export=true",)) for each in ("dpo", "kto", "orpo", "reward", "classify")},
    **{f"{each} adapter": (each, (*LORA, "train.export=merged")) for each in ("kto", "reward", "classify")},
}
GO_ON = ("kernels", "kto sharded", "reward sharded", "reward adapter")
FEW = ("train.device=cpu", "train.steps=4", "train.max_grad_norm=0.5")


def curves(run: Path) -> list[list[float]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [[row["loss"], row["grad_norm"]] for row in rows]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All runs, of one process and of two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    here = shutil.copytree(EXAMPLES, tmp_path_factory.mktemp("ranks") / "post_training")
    tied = ("train.steps=1", "train.device=cpu", "train.export=true", "model.config.tie_word_embeddings=true")
    run_job(load_job(here / "sft.yaml", [*tied, f"train.output_dir={here / 'base'}"]))
    weights = ("model.config=null", f"model.weights={here / 'base' / 'model'}", "data.tokenizer=null", *FEW)
    jobs: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {each: (each, FEW, ()) for each in COPIES}
    for name, (method, more) in SHARDED.items():
        jobs[name] = (method, (*weights, *more, "train.save_every=2"), ("train.fsdp_size=2",))
    jobs["orpo"] = ("orpo", jobs["orpo sharded"][1], ())
    two = []
    for name, (method, changes, sharded) in jobs.items():
        job = here / f"{method}.yaml"
        run_job(load_job(job, [*changes, "train.batch_size=4", f"train.output_dir={here / name}"]))
        both = [*changes, *sharded, "train.batch_size=2"]
        two.append(Case(str(job), [*both, f"train.output_dir={here / name}-2"]))
        if name in GO_ON:
            half, options = f"{here / name}-2/checkpoint-2", {"resume": True}
            two.append(Case(str(job), [*both, f"train.output_dir={here / name}-2-on"], options, half))
    ranks = finish(fork_ranks(run_cases, two, processes=2), timeout=400)
    torch.set_num_threads(threads)
    assert not any(rank.returncode for rank in ranks), ranks[0].stderr[-4000:]
    assert not [line for rank in ranks for line in rank.stdout.splitlines() if line.startswith('{"case"')]
    return here


@pytest.mark.parametrize("name", [*COPIES, *SHARDED])
def test_two_processes_learn_as_one(runs: Path, name: str) -> None:
    alone: Any = curves(runs / name)
    if name == "orpo sharded":  # TRL's loss is a mean over each process' tokens, as with a copy each
        alone = curves(runs / "orpo-2")
    assert len(alone) == 4
    for one, other in zip(alone, curves(runs / f"{name}-2"), strict=True):
        assert other == pytest.approx(one, rel=1e-4)


@pytest.mark.parametrize("name", GO_ON)
def test_a_sharded_run_of_a_method_goes_on(runs: Path, name: str) -> None:
    assert curves(runs / f"{name}-2-on") == curves(runs / f"{name}-2")
