"""Trainings in libraries that pin other versions: a tiny model with a tokenizer, and the scripts of a page."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tiny_training import llama
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from documented_code import Block, blocks
from installed_beside import environment_with, installed_beside

REPOSITORY = Path(__file__).resolve().parents[3]
OFFLINE = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
OFFLINE |= {"DO_NOT_TRACK": "1", "AXOLOTL_DO_NOT_TRACK": "1"}


def save_model(folder: Path) -> None:
    """A tiny Llama, and a tokenizer of single characters."""
    letters = {chr(code): code for code in range(32, 127)}
    characters = Tokenizer(models.WordLevel({"<|endoftext|>": 0, "\n": 1, **letters}, unk_token=" "))
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    llama(vocab_size=128).save_pretrained(folder)
    special = {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    PreTrainedTokenizerFast(tokenizer_object=characters, **special).save_pretrained(folder)


def write_lines(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def blocks_of_page(test: str) -> list[Block]:
    """The blocks of docs/how-to/bridges.md that name a test, which is given by its ``__file__``."""
    mark = Path(test).resolve().relative_to(REPOSITORY).as_posix()
    return [block for block in blocks(REPOSITORY / "docs" / "how-to" / "bridges.md") if block.value("run by ") == mark]


def write_files_of_page(test: str, folder: Path) -> None:
    """Write each of the test's blocks that begins with a file's name."""
    for block in blocks_of_page(test):
        if block.file:
            (folder / block.file).write_text(block.text, encoding="utf-8")


def run_scripts(folder: Path, asked: dict[str, Any], *requirements: str, more: tuple[Path, ...] = ()) -> None:
    """Run the scripts in one process with the libraries: see ``scripts_in_forks.py``."""
    (folder / "runs.json").write_text(json.dumps(asked), encoding="utf-8")
    beside = installed_beside(*requirements, dependencies=False)
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("scripts_in_forks.py")), "runs.json"],
        cwd=folder,
        env=environment_with(beside, *more, HF_DATASETS_CACHE=str(folder / "cache"), **OFFLINE),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def measured(rows: list[dict[str, Any]]) -> list[float]:
    """The loss of each step, and the norm of its gradients."""
    return [row[key] for row in rows if "loss" in row for key in ("loss", "grad_norm")]


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def error_of(folder: Path, run: str) -> str:
    """The error that ended a run: its type and its message."""
    error = json.loads((folder / f"{run}.error.json").read_text(encoding="utf-8"))
    return re.sub(r"\s+", " ", f"{error['error']}: {error['message']}")
