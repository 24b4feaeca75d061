"""``train.push_to``: an export goes to the Hub on request, and offline the files that would go are named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from typer.testing import CliRunner

from veomni_core.cli.app import build_app
from veomni_core.errors import ConfigError, HostError, JobFileError
from veomni_trainer.job.load import parse_job
from veomni_trainer.output.export import push

Train = Callable[..., bool]


def test_offline_the_files_that_would_go_are_named(
    job_data: dict[str, Any],
    train: Train,
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    job_data["train"] |= {"steps": 1, "export": True, "push_to": "acme/tiny"}
    train(job_data)
    (line,) = (each for each in capsys.readouterr().out.splitlines() if each.startswith("push_to: "))
    assert "not sent to acme/tiny, since HF_HUB_OFFLINE is set" in line
    assert all(path.name in line for path in (run / "model").iterdir())
    words = ["export", str(run), str(run.parent / "again"), "--push-to", "acme/tiny"]
    result = CliRunner().invoke(build_app(), words)
    assert result.exception is None, result.exception
    assert "not sent to acme/tiny" in result.stdout and "model.safetensors" in result.stdout


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"push_to": "acme/tiny"}, "sends the export to the Hub; set train.export: true"),
        ({"push_to": "tiny", "export": True}, "write whose repository it is: org/tiny"),
        ({"push_to": "acme/a b", "export": True}, "train.push_to"),
    ],
)
def test_a_push_of_nothing_or_to_nobody_is_refused(job_data: dict[str, Any], keys: dict[str, Any], words: str) -> None:
    job_data["train"] |= keys
    with pytest.raises(JobFileError, match=words):
        parse_job(job_data)


def test_without_a_token_nothing_is_trained_for_it(
    job_data: dict[str, Any], train: Train, run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    job_data["train"] |= {"export": True, "push_to": "acme/tiny"}
    with pytest.raises(HostError, match="no token for the Hub. Run `hf auth login`"):
        train(job_data)
    assert not run.exists()


def test_a_hub_that_is_not_reached_leaves_the_export_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # where nobody listens
    monkeypatch.setenv("HF_TOKEN", "none")
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(HostError, match=r"could not be sent to acme/tiny: .*The export is complete"):
        push(tmp_path, "acme/tiny")
    assert (tmp_path / "config.json").is_file()


def test_the_commands_name_is_checked_too(tmp_path: Path) -> None:
    error = (
        CliRunner().invoke(build_app(), ["export", str(tmp_path), str(tmp_path / "x"), "--push-to", "tiny"]).exception
    )
    assert isinstance(error, ConfigError) and "org/tiny" in str(error)
