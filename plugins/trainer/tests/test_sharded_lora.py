"""An adapter over a model that two processes share: it learns as one process does, goes on, and is merged."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from jobs_on_ranks import STEPS, Jobs
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from veomni_core.errors import JobFileError
from veomni_trainer.job.load import load_job

pytest.importorskip("transformers.distributed.expert_parallel", reason="transformers shards models since 5.21")

LORA = "lora={rank: 4, alpha: 8}"
FSDP = "train.fsdp_size=2"
KERNELS = "model.ops_implementation={preset: auto}"


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Jobs(tmp_path_factory.mktemp("sharded_lora"))
    torch.set_num_threads(threads)


def adapter_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


@pytest.mark.thorough
def test_two_processes_train_an_adapter_as_one_and_merge_it(jobs: Jobs) -> None:
    half = STEPS // 2
    for name, batches in (("llama", "train.batch_size=4"), ("moe", "train.gradient_accumulation=2")):
        jobs.alone(f"{name} alone", name, batches, LORA)
    sharded = ("train.save_every=6", "train.export=merged", LORA, FSDP)
    errors = jobs.together(
        2,
        [
            jobs.case("llama", "llama", *sharded),
            jobs.case("llama, on", "llama", LORA, FSDP, continues=f"llama/checkpoint-{half}", resume=True),
            jobs.case("moe", "moe", LORA, FSDP),
            jobs.case("kernels", "llama", LORA, FSDP, KERNELS, "train.save_every=6"),
            jobs.case("accumulated", "llama", LORA, FSDP, "train.batch_size=1", "train.gradient_accumulation=2"),
        ],
    )
    assert errors == {}
    jobs.assert_same("llama", "llama alone")
    jobs.assert_same("llama, on", "llama alone")
    jobs.assert_same("moe", "moe alone")
    wanted = [row["loss"] for row in jobs.rows("llama alone")]
    for name in ("kernels", "accumulated"):
        assert [row["loss"] for row in jobs.rows(name)] == pytest.approx(wanted, rel=1e-5), name
    checkpoint = Path(f"checkpoint-{half}")
    shutil.copytree(jobs.run("kernels") / checkpoint, jobs.run("kernels, on one") / checkpoint)
    jobs.alone("kernels, on one", "llama", "train.batch_size=4", LORA, KERNELS, resume=True)
    assert [row["loss"] for row in jobs.rows("kernels, on one")] == pytest.approx(wanted[half:], rel=1e-5)
    alone, both = (adapter_of(jobs.run(name) / f"checkpoint-{STEPS}") for name in ("llama alone", "llama"))
    assert alone.keys() == both.keys()
    for name, weight in alone.items():
        torch.testing.assert_close(both[name], weight, rtol=1e-4, atol=1e-6)
    merged = AutoModelForCausalLM.from_pretrained(jobs.run("llama") / "model")
    base = AutoModelForCausalLM.from_pretrained(jobs.root / "llama")
    changed = [name for name, p in merged.named_parameters() if not torch.equal(p, base.get_parameter(name))]
    assert changed and all("proj" in name for name in changed)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("train.tp_size=2", "sharded by fsdp_size alone"),
        ("train.fsdp=true", "fsdp_size: N in place of fsdp: true"),
        ("lora.quantization=nf4", r"lora\.quantization needs whole weights"),
        ("lora.modules_to_save=[lm_head]", r"lora\.modules_to_save needs whole weights"),
    ],
)
def test_what_needs_whole_weights_is_refused(jobs: Jobs, change: str, words: str) -> None:
    with pytest.raises(JobFileError, match=words):
        load_job(jobs.root / "llama.yaml", [LORA, *([] if "fsdp=" in change else [FSDP]), change, "train.output_dir=x"])
