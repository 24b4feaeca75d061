"""The documentation site, built and looked at in a real browser, on a phone and on a desk, in light and in dark."""

from __future__ import annotations

from pathlib import Path

import pytest

import build_site
from in_browser import chromium, inaccessible, opened, overflowing, views

# The start, a list of pages, a how-to, wide tables with a drawing, source code, and a page beside the code.
PAGES = [
    "docs/index",
    "docs/how-to/index",
    "docs/how-to/lora",
    "docs/reference/config",
    "docs/explanation/architecture",
    "source/core/src/veomni_core/planning/planner.py",
    "plugins/trainer/README",
]
SCROLLING = "pre, .table-wrapper"


# One test, so that one process builds the site.
@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_can_be_read_everywhere(tmp_path: Path) -> None:
    assert build_site.build()
    assert build_site.broken_links(build_site.SITE) == []
    problems: dict[str, list[str]] = {}
    with chromium() as browser:
        for name in PAGES:
            with opened(browser, build_site.SITE / f"{name}.html") as page:
                for view in views(page, tmp_path / name.replace("/", "-")):
                    problems[f"{name}, {view}"] = overflowing(page, SCROLLING) + inaccessible(page)
    assert [f"{view}: {found}" for view, problem in problems.items() for found in problem] == []


def test_a_link_of_the_site_that_leads_nowhere_is_seen(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "a.html").write_text(
        '<h1 id="top"><a href="folder/b.html#end">b</a> <a href="https://x.org">x</a></h1>'
    )
    (tmp_path / "folder" / "b.html").write_text('<p id="end"><a href="../a.html#top">a</a><a href="#end">end</a></p>')
    assert build_site.broken_links(tmp_path) == []
    (tmp_path / "folder" / "b.html").write_text(
        '<a href="../a.html#no">a</a><img src="gone.svg"><a href="#end">end</a>'
    )
    assert build_site.broken_links(tmp_path) == [
        "a.html: nothing has the anchor of folder/b.html#end",
        "folder/b.html: nothing has the anchor of #end",
        "folder/b.html: nothing has the anchor of ../a.html#no",
        "folder/b.html: gone.svg leads nowhere",
    ]
