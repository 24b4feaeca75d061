"""Writes everything of the documentation that is generated from the code and from the figures of benchmarks.

Without an option these are the pages of docs/reference that git ignores, the tables in docs/benchmarks, the pictures in
docs/images, the drawing of the architecture page and the list of the public API. ``--site`` writes only the pages that
git ignores: the site's build needs them. The page of coverage takes minutes, so it is written with ``--coverage``
alone; without it a page stands there that says how to get it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import coverage_page
import draw_architecture
import headline_picture
import printed_pictures
import public_api
from generated import REFERENCE
from reference_pages import PAGES, PARTS, headline

COVERAGE = REFERENCE / "coverage.md"
WITHOUT_COVERAGE = """# Coverage

What is found, proven and bound in each model type of transformers. The table takes minutes to make and is not part of
this build. `make generate COVERAGE=1` writes it, and the next `make docs` shows it.
"""


def write(path: Path, text: str) -> None:
    """Write a file unless it has this text already, so that Sphinx reads only what changed."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def site_pages(coverage: bool) -> None:
    """Write the pages that git ignores. A page of coverage that is there stays."""
    for name, page in PAGES.items():
        write(REFERENCE / name, page())
    if coverage:
        write(COVERAGE, coverage_page.generated())
    elif not COVERAGE.exists():
        write(COVERAGE, WITHOUT_COVERAGE)


def committed() -> None:
    """Write what is in the repository."""
    for path, page in PARTS.items():
        write(path, page())
    for name in printed_pictures.PICTURES:
        write(printed_pictures.FOLDER / f"{name}.svg", printed_pictures.picture(name))
    headline_picture.draw()
    headline.draw()
    write(draw_architecture.PAGE, draw_architecture.with_drawing(draw_architecture.PAGE.read_text(encoding="utf-8")))
    write(public_api.PAGE, public_api.listing())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--site", action="store_true", help="only the pages that git ignores")
    parser.add_argument("--coverage", action="store_true", help="the page of coverage too, which takes minutes")
    options = parser.parse_args()
    site_pages(options.coverage)
    if not options.site:
        committed()
    return 0


if __name__ == "__main__":
    sys.exit(main())
