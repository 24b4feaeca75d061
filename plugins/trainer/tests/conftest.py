"""Small jobs that train in a second, and the ways to run them."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from planted_kernels import PLUGIN
from post_training import EXAMPLES
from small_tokenizers import byte_level, saved
from tiny_configs import LLAMA, QWEN3_MOE

TEXT = "the quick brown fox jumps over the lazy dog; " * 60


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def qwen3_moe() -> dict[str, Any]:
    """The config of a tiny mixture of experts: its checkpoints store experts otherwise than the model holds them."""
    return deepcopy(QWEN3_MOE)


@pytest.fixture
def job_data(tmp_path: Path) -> dict[str, Any]:
    """A whole job: a tiny Llama on two small files."""
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.txt").write_text(TEXT, encoding="utf-8")
    (text / "b.txt").write_text(TEXT.upper(), encoding="utf-8")
    return {
        "model": {"config": deepcopy(LLAMA), "ops_implementation": {"preset": "eager"}},
        "data": {"files": "text", "sequence_length": 32},
        "train": {
            "output_dir": str(tmp_path / "run"),
            "steps": 4,
            "batch_size": 2,
            "learning_rate": 1e-3,
            "device": "cpu",
        },
    }


@pytest.fixture(scope="session")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders with weights, a config and a tokenizer: ``llama`` and ``moe``."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    root = tmp_path_factory.mktemp("pretrained")
    letters = {chr(code): code for code in range(32, 127)}
    characters = Tokenizer(models.WordLevel({"<|endoftext|>": 0, **letters}, unk_token=" "))
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    for name, config in (("llama", LLAMA), ("moe", QWEN3_MOE)):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config, vocab_size=128), dtype=torch.float32)
        model.save_pretrained(root / name)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters, eos_token="<|endoftext|>")
        tokenizer.save_pretrained(root / name)
    return root


@pytest.fixture
def lora_data(job_data: dict[str, Any], pretrained: Path) -> dict[str, Any]:
    """A job that trains an adapter over the weights of the tiny Llama."""
    weights = str(pretrained / "llama")
    job_data["model"] = {"weights": weights, "ops_implementation": {"preset": "eager"}}
    job_data["data"]["tokenizer"] = weights
    job_data["train"]["learning_rate"] = 0.01
    job_data["lora"] = {"rank": 4, "alpha": 8}
    return job_data


@pytest.fixture
def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Installs the plugin of wrong kernels, also for processes that the test starts."""

    def install() -> None:
        info = tmp_path / "site" / "acme_planted-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-planted\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[veomni.plugins]\nacme-planted = acme_planted\n")
        (info.parent / "acme_planted.py").write_text(PLUGIN)
        monkeypatch.syspath_prepend(str(info.parent))
        monkeypatch.delitem(sys.modules, "acme_planted", raising=False)

    return install


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., Path]:
    """Writes rows as JSON lines."""

    def write(*rows: Any, name: str = "rows.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


@pytest.fixture(scope="session")
def chat_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tokenizer with a chat template."""
    return saved(byte_level(), tmp_path_factory.mktemp("chat"))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The output folder of the job."""
    return tmp_path / "run"


@pytest.fixture
def moe_data(job_data: dict[str, Any], qwen3_moe: dict[str, Any]) -> dict[str, Any]:
    """The same job with a tiny mixture of experts, accumulating gradients."""
    job_data["model"]["config"] = qwen3_moe
    job_data["train"] |= {"steps": 6, "gradient_accumulation": 2, "warmup": 2}
    return job_data


@pytest.fixture
def write_job(tmp_path: Path) -> Callable[[dict[str, Any]], Path]:
    """Writes a job's YAML beside its data."""

    def write(data: dict[str, Any]) -> Path:
        path = tmp_path / "job.yaml"
        path.write_text(yaml.safe_dump(data), encoding="utf-8")
        return path

    return write


@pytest.fixture
def train(write_job: Callable[[dict[str, Any]], Path]) -> Callable[..., bool]:
    """Runs a job in this process; returns whether it was interrupted."""
    from veomni_trainer.job.load import load_job
    from veomni_trainer.run.run_job import run_job

    def train_job(data: dict[str, Any], *changes: str, **options: Any) -> bool:
        return run_job(load_job(write_job(data), changes), **options)

    return train_job


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A copy of ``examples/post_training``."""
    return shutil.copytree(EXAMPLES, tmp_path / "post_training")


@pytest.fixture
def go(here: Path) -> Callable[..., bool]:
    """Runs the post-training job of a method, with changes; writes to ``run`` beside it."""
    from veomni_trainer.job.load import load_job
    from veomni_trainer.run.run_job import run_job

    def run(method: str, *changes: str, **options: Any) -> bool:
        always = (f"train.output_dir={here / 'run'}", "train.device=cpu")
        return run_job(load_job(here / f"{method}.yaml", [*always, *changes]), **options)

    return run


@pytest.fixture
def losses() -> Callable[[Path], list[tuple[int, float]]]:
    """Step and loss of every training row in a run's metrics."""

    def read(run: Path) -> list[tuple[int, float]]:
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        return [(row["step"], row["loss"]) for row in rows if "loss" in row]

    return read
