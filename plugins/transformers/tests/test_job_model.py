"""The model section of a job: what it may say, by which words, and where its paths are looked up."""

from __future__ import annotations

import subprocess
import sys

import pytest

from veomni_core.errors import JobFileError
from veomni_transformers.jobs.job_model import ModelSection, ModelSectionError, model_section_of, read_model_section


def test_what_is_not_written_has_its_default():
    section = read_model_section({"config": {"model_type": "llama"}})
    assert section == ModelSection(config={"model_type": "llama"}, dtype=None, trust_remote_code=False)
    assert section.source == {"model_type": "llama"}


def test_other_words_mean_the_same():
    assert read_model_section({"config_path": "a", "path": "b"}) == read_model_section({"config": "a", "weights": "b"})
    assert read_model_section({"path": "b"}).source == "b"


def test_every_problem_is_told_under_the_word_that_was_written():
    with pytest.raises(ModelSectionError) as caught:
        read_model_section({"config_path": 3, "dtype": ["float32"], "trust_remote_code": 1, "wieghts": "w"})
    assert caught.value.problems == {
        "model.config_path": "must be text or a mapping, got 3 (integer)",
        "model.dtype": "must be 'float32', 'bfloat16' or 'float16', got ['float32'] (list)",
        "model.trust_remote_code": "must be true or false, got 1 (integer)",
        "model.wieghts": "there is no such key. Did you mean 'weights'?",
    }


def test_paths_are_looked_up_beside_the_job_then_in_the_working_directory_and_else_left_alone(tmp_path, monkeypatch):
    (tmp_path / "jobs" / "both").mkdir(parents=True)
    for name in ("both", "here"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)

    def found(name):
        return model_section_of({"model": {"config": name, "weights": name}}, "job.yaml", tmp_path / "jobs")

    assert found("both").config == found("both").weights == str(tmp_path / "jobs" / "both")
    assert found("here").config == str(tmp_path / "here")
    assert found("nobody/a-model-of-the-hub").config == "nobody/a-model-of-the-hub"


@pytest.mark.parametrize(
    "job, message",
    [
        ({}, "job.yaml: model: is missing"),
        ({"model": None}, "job.yaml: model: must be a mapping, got nothing"),
        (
            {"model": {"dtype": "fp8"}},
            "job.yaml: 2 problems\n  - model.dtype: must be 'float32', 'bfloat16' or 'float16', got 'fp8' (text)\n"
            "  - model: needs config (a mapping with model_type, a path, or a Hub id), or weights (a folder or a "
            "Hub id)",
        ),
    ],
)
def test_a_section_that_cannot_be_read_names_the_job(job, message, tmp_path):
    with pytest.raises(JobFileError) as caught:
        model_section_of(job, "job.yaml", tmp_path)
    assert str(caught.value) == message


def test_reading_loads_no_torch():
    code = "import sys, veomni_transformers.jobs.job_model; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
