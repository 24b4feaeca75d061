"""Prints for the user. Of several processes only the first one does."""

from __future__ import annotations

import os

from veomni_core.commands import fit


def is_main_process() -> bool:
    """Whether this process speaks and writes for the job."""
    return os.environ.get("RANK", "0") == "0"


def print_once(text: str) -> None:
    """Print ``text`` in the first process, broken between words where a line is longer than the terminal."""
    if is_main_process():
        print(fit(text), flush=True)
