"""The documentation site, built and looked at in a real browser, on a phone and on a desk, in light and in dark."""

from __future__ import annotations

from pathlib import Path

import pytest

import build_site
from in_browser import chromium, inaccessible, opened, overflowing, views

pytestmark = pytest.mark.docs

# The start, a how-to, wide tables, a drawing, and source code.
PAGES = [
    "docs/index",
    "docs/how-to/lora",
    "docs/reference/config",
    "docs/explanation/architecture",
    "source/core/src/veomni_core/planning/planner.py",
]
SCROLLING = "pre, .table-wrapper"


# One test, so that one process builds the site.
@pytest.mark.thorough
def test_the_site_builds_without_a_warning_and_can_be_read_everywhere(tmp_path: Path) -> None:
    assert build_site.build()
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


def test_what_is_wrong_with_a_page_is_seen(tmp_path: Path) -> None:
    wide = '<p style="width: 2000px">wide</p>'
    path = tmp_path / "page.html"
    path.write_text(
        f'<html lang="en"><title>page</title><img src="">{wide}<pre style="overflow: auto">{wide}</pre></html>'
    )
    with chromium() as browser, opened(browser, path) as page:
        assert [found.split()[0] for found in overflowing(page, "pre")] == ["HTML", "BODY"]
        assert any("Images must have alternative text" in found for found in inaccessible(page))
