"""docs/how-to/fine-tune-a-chat-model.md, command by command, in an environment with nothing but wheels in it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from small_tokenizers import byte_level
from tiny_configs import LLAMA
from transformers import LlamaConfig, LlamaForCausalLM

from fresh_environment import FAMILY, FreshEnvironment, build_wheel

pytestmark = pytest.mark.docs

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "how-to" / "fine-tune-a-chat-model.md").read_text(encoding="utf-8")
CHATS = {
    "What is the weather?": "It is sunny today, they say.",
    "What is over the lazy dog?": "The quick brown fox.",
    "Who jumps?": "the fox",
}


def _blocks(language: str) -> list[str]:
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return [block for written, block in fences if written == language]


def _commands() -> list[list[str]]:
    lines = [line for block in _blocks("") for line in block.splitlines()]
    return [line.split()[1:] for line in lines if line.startswith("veomni ")]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> FreshEnvironment:
    """The core, the trainer with its extras, and kernels for any device, each from its wheel."""
    folder = tmp_path_factory.mktemp("wheels")
    wheels = [build_wheel(ROOT / each, folder) for each in (*FAMILY, "plugins/trainer", "plugins/torch_native")]
    environment = FreshEnvironment(folder / "environment")
    environment.link_requirements(wheels, also=["peft", "tensorboard"])
    environment.install(*wheels)
    return environment


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A small pretrained checkpoint, a file of chats, and the page's job; the working directory of its commands."""
    folder = tmp_path_factory.mktemp("chat")
    torch.manual_seed(0)
    tokenizer = byte_level()
    config = {**LLAMA, "vocab_size": len(tokenizer), "max_position_embeddings": 256}
    LlamaForCausalLM(LlamaConfig(**config)).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    lines = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for _ in range(60)
        for question, answer in CHATS.items()
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    (folder / "chat.yaml").write_text(_blocks("yaml")[0], encoding="utf-8")
    before = Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


def test_from_weights_and_chats_to_an_answer(environment: FreshEnvironment, folder: Path) -> None:
    dry_run, train, resume, export = _commands()
    run = folder / "runs" / "chat"
    assert "60 steps" in _veomni(environment, dry_run) and not run.exists()

    _killed_after_a_checkpoint(environment, train, run)
    printed = _veomni(environment, resume)
    assert "resuming from" in printed
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 61))
    validated = [row["validation_loss"] for row in rows if "validation_loss" in row]
    assert len(validated) == 3 and validated[0] > validated[-1]
    assert list((run / "tensorboard").rglob("events.out.tfevents.*"))
    assert (run / "report.html").exists()

    _veomni(environment, export)
    assert (folder / "chat-model" / "model.safetensors").exists()
    (said,) = environment.run("-c", _blocks("python")[0]).strip().splitlines()[-1:]
    assert said


def _veomni(environment: FreshEnvironment, arguments: list[str]) -> str:
    return environment.run("-m", "veomni_core.cli", *arguments, environment={"OMP_NUM_THREADS": "1"})


def _killed_after_a_checkpoint(environment: FreshEnvironment, arguments: list[str], run: Path) -> None:
    """Start the training, and kill it as a power cut would, once it has a checkpoint."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [str(environment.python), "-m", "veomni_core.cli", *arguments]
    with subprocess.Popen(command, env={**clean, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 200
        while not (run / "checkpoint-10").exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    assert (run / "checkpoint-10").exists() and not (run / "checkpoint-60").exists()
