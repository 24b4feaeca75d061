"""Writes every page."""

from __future__ import annotations

from reference_pages import FOLDER, PAGES

for name, page in PAGES.items():
    (FOLDER / name).write_text(page(), encoding="utf-8")
