"""What ``--set`` changes in a job, and what is said where it leads nowhere."""

from __future__ import annotations

from typing import Any

import pytest

from veomni_core.errors import ConfigError, JobFileError, UnknownNameError
from veomni_trainer.job.load import apply_overrides


def test_set_changes_single_values_as_yaml(job_data: dict[str, Any]) -> None:
    changed = apply_overrides(
        job_data,
        [
            "train.steps=7",
            "train.gradient_checkpointing=true",
            "model.config.hidden_size=48",
            "model.ops_implementation={preset: auto}",
            "data.files=[a.txt, b=c.txt]",
        ],
    )
    assert changed["train"]["steps"] == 7
    assert changed["train"]["gradient_checkpointing"] is True
    assert changed["model"]["config"]["hidden_size"] == 48
    assert changed["model"]["ops_implementation"] == {"preset": "auto"}
    assert changed["data"]["files"] == ["a.txt", "b=c.txt"]
    assert job_data["train"]["steps"] == 4


def test_set_may_write_a_section_that_is_not_there() -> None:
    assert apply_overrides({}, ["model.ops_implementation.preset=auto"]) == {
        "model": {"ops_implementation": {"preset": "auto"}}
    }


@pytest.mark.parametrize(
    ("assignment", "error", "message"),
    [
        ("train.stps=3", UnknownNameError, "--set train.stps: there is no such key. Did you mean 'train.steps'?"),
        ("steps=3", UnknownNameError, "--set steps: there is no such key."),
        ("train.bf16=true", UnknownNameError, "--set train.bf16: there is no such key; write train.precision"),
        ("model.confg=x", UnknownNameError, "--set model.confg: there is no such key. Did you mean 'model.config'?"),
        ("model.dtype.more=3", UnknownNameError, "--set model.dtype.more: model.dtype holds a value, not a section"),
        ("train.steps.more=3", UnknownNameError, "--set train.steps.more: train.steps holds a value, not a section"),
        ("train.steps", ConfigError, "--set train.steps: write it as path=value, e.g. --set train.steps=100"),
        ("=3", ConfigError, "--set =3: write it as path=value"),
        ("train.steps=[1", JobFileError, "--set train.steps, line 1, column 3: "),
    ],
)
def test_set_refuses_what_leads_nowhere(
    job_data: dict[str, Any], assignment: str, error: type[ConfigError], message: str
) -> None:
    with pytest.raises(error) as caught:
        apply_overrides(job_data, [assignment])
    assert str(caught.value).startswith(message)


def test_set_does_not_reach_into_a_path(job_data: dict[str, Any]) -> None:
    job_data["model"]["config"] = "some/folder"
    with pytest.raises(ConfigError, match=r"model\.config is not a mapping in this job, but 'some/folder'"):
        apply_overrides(job_data, ["model.config.hidden_size=48"])
