"""Ids of the Hugging Face Hub for weights, tokenizers and data sets: from its cache, at one commit, or refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import yaml
from hub_caches import COMMIT, OTHER, HubCache
from huggingface_hub import constants
from local_hub import LocalHub
from safetensors.torch import load_file, save_file

from veomni_core import Hardware, build_foundation_model
from veomni_core.errors import ConfigError, HostError, JobFileError
from veomni_trainer.data.corpus import read_corpus
from veomni_trainer.data.tokens import load_tokenizer
from veomni_trainer.job.data_section import DataSection
from veomni_trainer.output.export import export_checkpoint
from veomni_trainer.run.check import check_job, pinned_job
from veomni_trainer.run.dry_run import dry_run

Train = Callable[..., bool]
Losses = Callable[[Path], list[tuple[int, float]]]
ROWS = [{"prompt": f"What is {number}? ", "completion": f"It is {number}."} for number in range(40)]


@pytest.fixture
def hub(tmp_path: Path, pretrained: Path, monkeypatch: pytest.MonkeyPatch) -> HubCache:
    """A cache with the model ``acme/tiny`` and the data set ``acme/rows``; nothing else can be reached."""
    cache = HubCache(tmp_path / "hub")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache.folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "prepared")
    cache.add("acme/tiny", pretrained / "llama")
    rows = tmp_path / "rows"
    rows.mkdir()
    for split, part in {"train": ROWS[:30], "test": ROWS[30:]}.items():
        lines = "".join(json.dumps(row) + "\n" for row in part)
        (rows / f"{split}.jsonl").write_text(lines, encoding="utf-8")
    cache.add("acme/rows", rows, "dataset")
    return cache


@pytest.fixture
def hub_job(job_data: dict[str, Any], hub: HubCache) -> dict[str, Any]:
    """A job that trains the one on the other."""
    job_data["model"] = {"weights": "acme/tiny", "ops_implementation": {"preset": "eager"}}
    job_data["data"] = {"files": "acme/rows", "split": "train", "validation_split": "test", "sequence_length": 32}
    job_data["train"] |= {"save_every": 2, "keep_checkpoints": 9}
    return job_data


def _moved(hub: HubCache, folder: Path) -> None:
    """The branch ``main`` of the model gets other weights."""
    shutil.copytree(hub.folder / "models--acme--tiny" / "snapshots" / COMMIT, folder)
    weights = {name: torch.zeros_like(each) for name, each in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    hub.add("acme/tiny", folder, commit=OTHER)


def test_a_job_of_ids_trains_and_its_record_has_the_commits(
    hub_job: dict[str, Any], train: Train, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(hub_job, "train.steps=1")
    written = yaml.safe_load((run / "job.yaml").read_text(encoding="utf-8"))
    assert written["model"]["weights"] == f"acme/tiny@{COMMIT}"
    assert written["data"]["files"] == f"acme/rows@{COMMIT}"
    assert "1 jsonl: 30 documents, prompts in column 'prompt'" in capsys.readouterr().out
    assert [each["key"] for each in json.loads((run / "data.json").read_text())] == [
        "data.files",
        "data.validation_split",
    ]


@pytest.mark.parametrize(
    "lora",
    [pytest.param({}, id="whole"), pytest.param({"lora": {"rank": 2}}, id="adapter", marks=pytest.mark.thorough)],
)
def test_a_resumed_run_keeps_its_commits(
    hub_job: dict[str, Any],
    hub: HubCache,
    train: Train,
    losses: Losses,
    run: Path,
    tmp_path: Path,
    lora: dict[str, Any],
) -> None:
    train(hub_job | lora)
    whole = losses(run)
    shutil.rmtree(run / "checkpoint-4")
    _moved(hub, tmp_path / "moved")
    train(hub_job | lora, resume=True)
    assert losses(run) == whole
    with pytest.raises(ConfigError, match=r"model\.revision: not there -> main \(another commit"):
        train(hub_job | lora, "model.revision=main", "train.steps=6", resume=True)


@pytest.mark.thorough
def test_an_adapter_names_its_base_on_the_hub_and_is_merged_into_it(
    hub_job: dict[str, Any], hub: HubCache, train: Train, run: Path, tmp_path: Path
) -> None:
    train(hub_job | {"lora": {"rank": 2}}, "train.export=merged", "train.save_every=4")
    adapter = json.loads((run / "checkpoint-4" / "adapter_config.json").read_text(encoding="utf-8"))
    assert (adapter["base_model_name_or_path"], adapter["revision"]) == ("acme/tiny", COMMIT)
    _moved(hub, tmp_path / "moved")
    export_checkpoint(run / "checkpoint-4", tmp_path / "again", False, True)
    merged = [load_file(folder / "model.safetensors") for folder in (run / "model", tmp_path / "again")]
    assert all(torch.equal(each, merged[1][name]) for name, each in merged[0].items())


def test_ids_are_pinned_at_their_revision(
    hub_job: dict[str, Any], hub: HubCache, write_job: Callable[..., Path], tmp_path: Path
) -> None:
    from veomni_trainer.job.load import load_job

    hub.add("acme/tiny", tmp_path / "hub" / "models--acme--tiny" / "snapshots" / COMMIT, commit=OTHER, ref="v2")
    hub_job["data"]["tokenizer"] = "acme/tiny@v2"
    hub_job["model"] |= {"config": "acme/tiny", "revision": "v2"}
    job = pinned_job(load_job(write_job(hub_job)))
    assert (job.model.weights, job.model.config) == (f"acme/tiny@{OTHER}",) * 2
    assert job.data.tokenizer == f"acme/tiny@{OTHER}"
    assert pinned_job(job) == job
    assert dry_run(job).parameters > 1000
    assert check_job(write_job(hub_job), Hardware.cpu()).vocabulary == 128


def test_a_data_set_may_have_subsets_and_is_read_as_files_are(hub: HubCache, tmp_path: Path) -> None:
    folder = tmp_path / "subsets"
    for name in ("short", "long"):
        (folder / name).mkdir(parents=True)
        text = "word " * (40 if name == "long" else 10)
        datasets.Dataset.from_dict({"text": [text] * 4, "id": [*range(4)]}).to_parquet(folder / name / "train.parquet")
    configs = [{"config_name": name, "data_files": f"{name}/*.parquet"} for name in ("short", "long")]
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': configs})}---\n", encoding="utf-8")
    hub.add("acme/subsets", folder, "dataset")

    def tokens(**keys: Any) -> int:
        data = DataSection(files=["acme/subsets"], sequence_length=8, cache=str(tmp_path / "tokens"), **keys)
        return read_corpus(data, load_tokenizer("bytes")).read[0].tokens

    assert tokens(subset="short") == 4 * 51 and tokens(subset="long") == 4 * 201
    with pytest.raises(
        JobFileError, match=r"acme/subsets@a+ is not a data set that can be read: Config name is missing"
    ):
        tokens()
    streamed = DataSection(files="acme/subsets", subset="short", streaming=True, sequence_length=8)
    assert next(iter(read_corpus(streamed, load_tokenizer("bytes")).training))["input_ids"].shape == (8,)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (
            "model.weights=acme/tinny",
            HostError,
            "model.weights: acme/tinny is no path here, the Hub's cache .* no model",
        ),
        (
            "model.revision=v9",
            HostError,
            "no model of that id at revision 'v9', and the Hub can't be reached: HF_HUB_OFF",
        ),
        (
            "model={config: acme/none, ops_implementation: {preset: eager}}",
            HostError,
            "model.config: acme/none is no path",
        ),
        ("data.files=acme/row", HostError, "data.files: acme/row is no path here, .* no dataset of that id"),
        ("data.tokenizer=acme/none", HostError, "data.tokenizer: acme/none is no path here"),
        ("data.split=tests", JobFileError, 'acme/rows@a+ is not a data set .*Unknown split "tests"'),
        (
            "data={files: acme/rows, sequence_length: 8}",
            JobFileError,
            "holds the splits train, test, and data.split names",
        ),
        (
            "data={files: text, subset: a, sequence_length: 8}",
            JobFileError,
            "no data set of the Hub, and data.subset is",
        ),
        (
            "model={config: {model_type: llama}, revision: v2, ops_implementation: {preset: eager}}",
            ConfigError,
            "revision",
        ),
        ("data.validation_fraction=0.1", JobFileError, "validation_split and validation_fraction both say"),
    ],
)
def test_what_is_not_there_is_named(
    hub_job: dict[str, Any],
    train: Train,
    run: Path,
    write_job: Callable[..., Path],
    change: str,
    error: type[Exception],
    says: str,
) -> None:
    from veomni_trainer.job.load import load_job

    with pytest.raises(error, match=says):
        train(hub_job, change)
    with pytest.raises(error, match=says):
        dry_run(load_job(write_job(hub_job), [change]))
    assert not run.exists()


def test_a_path_that_is_misspelt_is_answered_by_the_nearest(hub: HubCache, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "chats").mkdir(parents=True)
    with pytest.raises(HostError, match=r"data/chat is no path here.*Did you mean 'chats'\?"):
        read_corpus(DataSection(files="data/chat", sequence_length=8), load_tokenizer("bytes"))


def test_a_cache_without_weights_is_named_before_training(hub: HubCache, hub_job: dict[str, Any], train: Train) -> None:
    (hub.folder / "models--acme--tiny" / "snapshots" / COMMIT / "model.safetensors").unlink()
    with pytest.raises(HostError, match=r"has no weights \(\*\.safetensors\) of acme/tiny"):
        train(hub_job)


READ = """
import sys
from veomni_trainer.data.corpus import read_corpus
from veomni_trainer.data.tokens import load_tokenizer
from veomni_trainer.job.data_section import DataSection
keys = {"split": "train", "sequence_length": 16, "cache": False, "streaming": sys.argv[1] == "stream"}
corpus = read_corpus(DataSection(files="acme/rows", **keys), load_tokenizer("bytes"))
print(corpus.describe(), next(iter(corpus.training))["input_ids"].shape)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["stored", "stream"])
def test_a_data_set_comes_from_the_hub(hub: HubCache, tmp_path: Path, how: str) -> None:
    server = LocalHub("acme/rows", tmp_path / "rows", {"main": COMMIT}, "dataset")
    with server.serving():
        environment = {
            **os.environ,
            "HF_HOME": str(tmp_path / "home"),
            "HF_ENDPOINT": server.url,
            "HF_HUB_OFFLINE": "0",
        }
        result = subprocess.run(
            [sys.executable, "-c", READ, how], env=environment, capture_output=True, text=True, timeout=120, check=False
        )
    assert result.returncode == 0, result.stderr
    assert ("torch.Size" in result.stdout) and ("30 documents" in result.stdout or how == "stream")
    assert server.downloads.count("train.jsonl") == 1 or how == "stream"


DOWNLOAD = """
import sys
from veomni_transformers.jobs.job_model import ModelSection
section = ModelSection(weights="acme/tiny", revision=sys.argv[1]).pinned().located(with_weights=True)
print(section.weights)
"""


@pytest.mark.thorough
def test_processes_download_once_and_a_cache_serves_without_a_connection(tmp_path: Path, pretrained: Path) -> None:
    hub = LocalHub("acme/tiny", pretrained / "llama", {"main": COMMIT})
    with hub.serving():
        environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}

        def start(revision: str) -> subprocess.Popen[str]:
            command = [sys.executable, "-c", DOWNLOAD, revision]
            pipe = subprocess.PIPE
            return subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)

        ends = [each.communicate(timeout=120) for each in (start("main"), start("main"))]
        assert [out.strip().rpartition("/")[2] for out, _ in ends] == [COMMIT, COMMIT], ends
        assert sorted(hub.downloads) == sorted({*hub.downloads}) and "model.safetensors" in hub.downloads
        assert "acme/tiny has no revision 'v9' on the Hub" in start("v9").communicate(timeout=120)[1]
        before = len(hub.downloads)
    assert start("main").communicate(timeout=120)[0].strip() == ends[0][0].strip()
    assert len(hub.downloads) == before


def test_a_model_is_built_from_an_id_in_python(hub: HubCache, pretrained: Path) -> None:
    model = build_foundation_model(
        str(pretrained / "llama"),
        "acme/tiny",
        ops_implementation={"preset": "eager"},
        torch_dtype="float32",
        init_device="cpu",
    )
    assert torch.equal(
        model.state_dict()["model.norm.weight"],
        load_file(pretrained / "llama" / "model.safetensors")["model.norm.weight"],
    )
