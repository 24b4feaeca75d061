"""A cache of the Hugging Face Hub, made by hand in its own layout, so that nothing is downloaded."""

from __future__ import annotations

import shutil
from pathlib import Path

from huggingface_hub import constants

from forked_processes import run_veomni

COMMIT, OTHER = "a" * 40, "b" * 40


class HubCache:
    """The folder of the cache."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, identifier: str, content: Path, kind: str = "model", commit: str = COMMIT, ref: str = "main") -> Path:
        """Puts the files of ``content`` into a commit of ``identifier``, which ``ref`` is then; returns its folder."""
        repository = self.folder / f"{kind}s--{identifier.replace('/', '--')}"
        snapshot = shutil.copytree(content, repository / "snapshots" / commit, dirs_exist_ok=True)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / ref).write_text(commit, encoding="utf-8")
        return snapshot


def run_offline(cache: str, *arguments: str) -> None:
    """The ``veomni`` command, in this process, with ``cache`` alone to read of the Hub."""
    constants.HF_HUB_CACHE, constants.HF_HUB_OFFLINE = cache, True
    run_veomni(*arguments)
