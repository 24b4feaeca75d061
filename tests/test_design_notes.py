"""Every design note is short, and the index lists it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "design"
NOTES = sorted(path for path in FOLDER.glob("*.md") if path.name != "index.md")


@pytest.mark.parametrize("path", NOTES, ids=lambda path: path.stem)
def test_a_note_has_at_most_500_words(path):
    assert len(path.read_text(encoding="utf-8").split()) <= 500


def test_the_index_lists_every_note():
    index = (FOLDER / "index.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| \[.*?\]\((.*?)\)", index, re.MULTILINE)) == sorted(path.name for path in NOTES)
