"""The jobs of ``examples/pictures``: killed and resumed as if nothing had been, adapted, merged, and asked."""

from __future__ import annotations

import json
import runpy
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from test_answering import answer, veomni

EXAMPLE = Path(__file__).parents[3] / "examples" / "pictures"
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(not EXAMPLE.is_dir(), reason="the examples lie in the repository"),
]
ON_CPU = ("--set", "train.device=cpu")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the example with its pictures, which is the working directory."""
    folder = shutil.copytree(EXAMPLE, tmp_path / "pictures")
    monkeypatch.chdir(folder)
    runpy.run_path(str(folder / "make_pictures.py"), run_name="__main__")
    return folder


def train(job: str, *words: str) -> None:
    result = veomni("train", job, *ON_CPU, *words)
    assert result.exception is None, result.exception


def killed_after(checkpoint: Path, job: str) -> None:
    """Kill a process of the job at once when it has written the checkpoint, in the middle of a later step."""
    words = (sys.executable, "-m", "veomni_core.cli", "train", job, *ON_CPU)
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 200
    while not (checkpoint / "plan.json").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    assert process.wait() < 0


def rows(folder: Path) -> list[Any]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [[(row := json.loads(line))["step"], row["loss"], row["grad_norm"]] for line in lines]


def test_pictures_are_learned_through_a_kill_adapted_merged_and_asked_about(here: Path) -> None:
    whole, resumed = here / "runs" / "whole", here / "runs" / "captions"
    train("captions.yaml", "--set", "train.output_dir=runs/whole")
    killed_after(resumed / "checkpoint-40", "captions.yaml")
    train("captions.yaml", "--resume")
    assert rows(resumed) == rows(whole) and len(rows(whole)) == 120
    name = "checkpoint-120/model.safetensors"
    assert (resumed / name).read_bytes() == (whole / name).read_bytes()
    train("captions_lora.yaml")
    for folder, question, answers in (
        ("runs/captions", "What is it?", {"red-disk": "a red disk", "blue-bar": "a blue bar"}),
        ("runs/captions_lora", "Which colour?", {"green-bar": "green"}),
        ("runs/captions_lora/model", "Which colour?", {"green-bar": "green", "yellow-square": "yellow"}),
    ):
        for picture, said in answers.items():
            image = ("--image", f"pictures/{picture}.png")
            assert answer("chat", folder, "--prompt", question, *image)["text"] == said
            text = f"<|user|><image>{question}<|assistant|>"
            assert answer("generate", folder, "--prompt", text, *image)["text"] == said
        asked, blind = answer("chat", folder, "--prompt", question), text.replace("<image>", "")
        assert asked["text"] == answer("generate", folder, "--prompt", blind)["text"]
