"""What a job may say, and what is said about one that says something else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from veomni_core.errors import JobFileError, UnknownNameError
from veomni_trainer.job.load import apply_overrides, dump_job, load_job, parse_job
from veomni_trainer.job.resuming import changed_keys


def test_defaults_are_filled_and_paths_are_made_absolute(
    job_data: dict[str, Any], write_job: Callable[[dict[str, Any]], Path], tmp_path: Path
) -> None:
    job = load_job(write_job(job_data))
    assert job.data.files == str(tmp_path / "text")
    assert job.train.gradient_accumulation == 1
    assert job.train.save_every == 500


def test_the_dumped_job_is_the_same_job(
    job_data: dict[str, Any], write_job: Callable[[dict[str, Any]], Path], tmp_path: Path
) -> None:
    job = load_job(write_job(job_data))
    dumped = tmp_path / "elsewhere" / "job.yaml"
    dumped.parent.mkdir()
    dumped.write_text(dump_job(job), encoding="utf-8")
    assert load_job(dumped) == job
    assert changed_keys(dumped.parent, job) == []
    more = load_job(dumped, ["train.steps=9"])
    assert [str(change) for change in changed_keys(dumped.parent, more)] == ["train.steps: 4 -> 9"]


def test_the_working_directory_is_searched_after_the_jobs_folder(
    job_data: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "jobs").mkdir()
    monkeypatch.chdir(tmp_path)
    assert parse_job(job_data, folder=tmp_path / "jobs").data.files == str(tmp_path / "text")
    job_data["data"]["files"] = "text/*.txt"
    assert parse_job(job_data, folder=tmp_path / "jobs").data.files == str(tmp_path / "text" / "*.txt")
    (tmp_path / "jobs" / "text").mkdir()
    (tmp_path / "jobs" / "text" / "c.txt").touch()
    assert parse_job(job_data, folder=tmp_path / "jobs").data.files == str(tmp_path / "jobs" / "text" / "*.txt")


def test_scientific_notation_without_a_point_is_a_number(job_data: dict[str, Any]) -> None:
    job_data["train"]["learning_rate"] = "3e-4"  # what YAML makes of 3e-4
    assert parse_job(job_data).train.learning_rate == 3e-4


def test_weights_alone_name_a_model(job_data: dict[str, Any]) -> None:
    job_data["model"] = {"weights": "folder", "ops_implementation": {"preset": "eager"}}
    assert parse_job(job_data).model.config is None


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("train", "lerning_rate", 1.0, "train.lerning_rate: there is no such key. Did you mean 'learning_rate'?"),
        ("model", "ops_implementatoin", {}, "model.ops_implementatoin: there is no such key. Did you mean 'ops_impl"),
        ("train", "steps", "sixty", "train.steps: must be an integer, got 'sixty' (text)"),
        ("train", "steps", True, "train.steps: must be an integer, got True (true/false)"),
        ("train", "steps", 0, "train.steps: must be greater than or equal to 1, got 0 (integer)"),
        ("train", "learning_rate", "fast", "train.learning_rate: must be a number, got 'fast' (text)"),
        ("train", "fsdp", "no way", "train.fsdp: must be true or false, got 'no way' (text)"),
        ("train", "device", "gpu", "train.device: must be 'auto', 'cpu' or 'cuda', got 'gpu' (text)"),
        (
            "train",
            "save_every",
            "often",
            "train.save_every: must be an integer or 'end' or 'never', got 'often' (text)",
        ),
        ("data", "files", 3, "data.files: must be text or a list, got 3 (integer)"),
        ("data", "validation_fraction", 0.9, "data.validation_fraction: must be less than or equal to 0.5, got 0.9"),
        ("model", "config", 3, "model.config: must be text or a mapping, got 3 (integer)"),
        ("model", "config", None, "model: needs config (a mapping with model_type, a path, or a Hub id), or weights"),
        ("train", "validate_every", 2, "train.validate_every needs sequences to validate on; set data.validation_fr"),
        ("train", "warmup", 5, "train.warmup: 5 is as long as the training or longer, and train.steps gives 4"),
        ("train", "warmup", 4, "train.warmup: 4 is as long as the training or longer"),
        ("model", "dtype", "float8", "model.dtype: must be 'float32', 'bfloat16' or 'float16', got 'float8' (text)"),
        ("model", "dtype", "float16", "model.dtype: float16 holds nothing below 6e-8, so weights"),
        ("model", "dtype", "bfloat16", "model.dtype is bfloat16, but a job without train.precision trains float32"),
        ("train", "bf16", True, "train.bf16: there is no such key; write train.precision: bf16_mixed"),
        ("train", "precision", "bf32", "train.precision: must be 'bf16_mixed', 'bf16', 'fp16_mixed' or 'float32', got"),
        ("model", "path", 3, "model.path: must be text, got 3 (integer)"),
        ("model", "config_path", "config.json", "model.config_path: is another word for model.config, which is given"),
        ("model", "moe_implementation", "eager", "model.moe_implementation: there is no such key. A kernel is chosen"),
    ],
)
def test_a_wrong_key_or_value_is_named(
    job_data: dict[str, Any], section: str, key: str, value: Any, message: str
) -> None:
    job_data[section][key] = value
    with pytest.raises(JobFileError) as caught:
        parse_job(job_data, "job.yaml")
    assert f"job.yaml: {message}" in str(caught.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"files": "a", "sources": [{"files": "b"}]},
            "data: needs files, or sources (a list, each",
        ),
        ({"sources": []}, "data: sources is an empty list; name at least one source"),
        ({"sources": ["a.txt"]}, "data.sources.0: must be a mapping, got 'a.txt' (text)"),
        ({"sources": [{"files": "a", "weight": 0}]}, "data.sources.0.weight: must be greater than 0, got 0 (integer)"),
        ({"sources": [{"files": "a"}, {"fils": "b", "files": "b"}]}, "data.sources.1.fils: there is no such key. Did"),
        ({"sources": [{"files": "a", "columns": {"txt": "b"}}]}, "data.sources.0.columns.txt: there is no such key."),
        (
            {"files": "a", "format": "xml"},
            "data.format: must be 'text', 'jsonl', 'json', 'csv', 'tsv', 'par",
        ),
        (
            {"files": "a", "columns": {}},
            "data.columns: names none; name text, or messages, or prompt and completion, or",
        ),
        ({"files": "a", "columns": {"chosen": "a"}}, "data.columns: chosen and rejected belong together; name both"),
        (
            {"files": "a", "columns": {"text": "a", "tools": "b"}},
            "data.columns: tools are those of a chat; name",
        ),
        ({"files": "a", "loss_on": "user"}, "data.loss_on: must be 'assistant' or 'all', got 'user' (text)"),
        ({"files": "a", "bad_lines": "ignore"}, "data.bad_lines: must be 'stop' or 'skip', got 'ignore' (text)"),
        (
            {"files": "a", "validation_files": "b", "validation_fraction": 0.1},
            "data: validation_files and valid",
        ),
    ],
)
def test_what_data_may_not_say(job_data: dict[str, Any], data: dict[str, Any], message: str) -> None:
    job_data["data"] = {"sequence_length": 32, **data}
    with pytest.raises(JobFileError) as caught:
        parse_job(job_data, "job.yaml")
    assert f"job.yaml: {message}" in str(caught.value)


def test_a_source_takes_what_it_leaves_out_from_data(
    job_data: dict[str, Any], write_job: Callable[[dict[str, Any]], Path], tmp_path: Path
) -> None:
    job_data["data"] = {
        "bad_lines": "skip",
        "columns": {"text": "body"},
        "sources": [{"files": "text", "weight": 3}, {"files": ["text/a.txt"], "bad_lines": "stop", "columns": None}],
        "validation_files": "text/b.txt",
        "sequence_length": 32,
    }
    job_data["train"]["validate_every"] = 2
    job = load_job(write_job(job_data))
    dumped = tmp_path / "dumped.yaml"
    dumped.write_text(dump_job(job), encoding="utf-8")
    assert load_job(dumped) == job
    assert [each.bad_lines for each in load_job(dumped, ["data.bad_lines=stop"]).data.training_sources.values()] == [
        "stop",
        "stop",
    ]
    data = job.data
    first, second = data.training_sources.values()
    assert [*data.training_sources] == ["data.sources.0.files", "data.sources.1.files"]
    assert (first.files, first.weight, first.bad_lines) == (str(tmp_path / "text"), 3.0, "skip")
    assert first.columns is not None and first.columns.text == "body"
    assert (second.files, second.bad_lines, second.columns) == ([str(tmp_path / "text" / "a.txt")], "stop", None)
    (held_out,) = data.validation_source.values()
    assert (held_out.files, held_out.bad_lines) == (str(tmp_path / "text" / "b.txt"), "skip")


@pytest.mark.parametrize(
    ("section", "key", "hint"),
    [
        ("train", "lr", "'learning_rate'"),
        ("train", "bs", "'batch_size'"),
        ("train", "batch", "'batch_size'"),
        ("train", "per_device_train_batch_size", "'batch_size'"),
        ("train", "num_train_epochs", "'epochs' or 'steps'"),
        ("train", "max_steps", "'steps'"),
        ("train", "wd", "'weight_decay'"),
        ("train", "gradient_accumulation_steps", "'gradient_accumulation'"),
        ("train", "tokenizer_path", "'data.tokenizer'"),
        ("train", "max_seq_length", "'data.sequence_length'"),
        ("data", "lr", "'train.learning_rate'"),
        (None, "output_dir", "'train.output_dir'"),
        ("model", "torch_dtype", "'dtype'"),
    ],
)
def test_a_key_of_another_trainer_is_answered_by_ours(
    job_data: dict[str, Any], section: str | None, key: str, hint: str
) -> None:
    (job_data[section] if section else job_data)[key] = 1
    with pytest.raises(JobFileError) as caught:
        parse_job(job_data, "job.yaml")
    assert f"{key}: there is no such key. Did you mean {hint}?" in str(caught.value)
    path = f"{section}.{key}" if section else key
    with pytest.raises(UnknownNameError) as refused:
        apply_overrides(job_data, [f"{path}=1"])
    assert hint.split("'")[1] in str(refused.value)


@pytest.mark.parametrize(
    ("section", "key", "value", "hint"),
    [
        ("train", "device", "gpu", "'cuda'"),
        ("model", "dtype", "bf16", "'bfloat16'"),
    ],
)
def test_a_value_of_another_name_is_answered_by_ours(
    job_data: dict[str, Any], section: str, key: str, value: str, hint: str
) -> None:
    job_data[section][key] = value
    with pytest.raises(JobFileError, match=f"got '{value}' \\(text\\). Did you mean {hint}\\?"):
        parse_job(job_data)


def test_every_problem_is_in_one_message(job_data: dict[str, Any]) -> None:
    job_data["trian"] = {}
    job_data["train"] = [1]
    del job_data["data"]["files"]
    with pytest.raises(JobFileError) as caught:
        parse_job(job_data, "job.yaml")
    assert str(caught.value) == (
        "job.yaml: 3 problems\n"
        "  - data: needs files, or sources (a list, each with its own files): both are missing\n"
        "  - train: must be a mapping, got [1] (list)\n"
        "  - trian: there is no such key. Did you mean 'train'?"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {}\nmodel: {}\n", "line 2, column 1: key 'model' appears twice, first in line 1"),
        ("train:\n  steps: [1, 2\n", "line 3, column 1: "),
        ("- a\n", "a job file is a mapping of sections such as model, data and train; this holds a list"),
        ("", "this is empty"),
    ],
)
def test_faulty_yaml_is_answered_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(JobFileError) as caught:
        load_job(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


def test_a_missing_job_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(JobFileError, match="there is no such file"):
        load_job(tmp_path / "none.yaml")
