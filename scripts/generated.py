"""The pages of docs/reference that are generated when the site is built, and so are not in the repository."""

from __future__ import annotations

from pathlib import Path

REFERENCE = Path(__file__).resolve().parent.parent / "docs" / "reference"


def generated_pages() -> set[Path]:
    """Their paths, whether they have been generated here or not: those that git ignores."""
    lines = (REFERENCE / ".gitignore").read_text(encoding="utf-8").splitlines()
    return {REFERENCE / line for line in lines if line and not line.startswith("#")}
