"""What tests ask of a page in headless Chromium: what overflows, and what axe finds."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

WIDTHS = (390, 1280)  # a phone and a desk
SCHEMES = ("light", "dark")
# The elements whose content is wider than they are, but for boxes that may scroll and what is in them.
OVERFLOWING = """
scrolling => {
  document.querySelectorAll("details").forEach(each => { each.open = true; });
  const inside = (each, box) => each.left >= box.left - 1 && each.right <= box.right + 1;
  const wide = each => each.closest("svg")
    ? !inside(each.getBoundingClientRect(), each.closest("svg").getBoundingClientRect()) && each.tagName === "text"
    : each.clientWidth > 0 && each.scrollWidth > each.clientWidth;
  const found = [document.documentElement, ...document.querySelectorAll("body, body *")]
    .filter(each => wide(each) && !(scrolling && each.closest(scrolling)));
  return found.map(each => `${each.tagName} ${each.className} ${each.scrollWidth} > ${each.clientWidth}`);
}
"""


@contextmanager
def chromium() -> Iterator[Browser]:
    """A headless browser; the test is skipped where there is none, except in continuous integration."""
    found = shutil.which("chromium")
    if found is None:
        why = "there is no chromium; scripts/install_browser.sh installs it"
        pytest.fail(why) if os.environ.get("CI") == "true" else pytest.skip(why)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"], timeout=120_000)
        yield browser
        browser.close()


@contextmanager
def opened(browser: Browser, path: Path) -> Iterator[Page]:
    """A file, in a window of its own."""
    page = browser.new_page()
    page.set_default_timeout(120_000)
    page.goto(path.as_uri())
    yield page
    page.close()


def views(page: Page, pictures: Path) -> Iterator[str]:
    """Shows a page on a phone and on a desk, in light and in dark, with a picture each: ``PICTURES-390-dark.png``."""
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        for scheme in SCHEMES:
            page.emulate_media(color_scheme=scheme)
            assert _shown_in(page) == scheme
            page.screenshot(path=f"{pictures}-{width}-{scheme}.png")
            yield f"{width} pixels, {scheme}"


def _shown_in(page: Page) -> str:
    red = page.evaluate("Number(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0])")
    return "light" if red > 127 else "dark"


def overflowing(page: Page, scrolling: str = "") -> list[str]:
    """What is wider than the box that it is in; ``scrolling`` selects the boxes that may scroll."""
    return page.evaluate(OVERFLOWING, scrolling)


def inaccessible(page: Page) -> list[str]:
    """What axe calls serious or critical."""
    from axe_playwright_python.sync_playwright import Axe

    violations = Axe().run(page).response["violations"]
    return [
        f"{violation['impact']}: {violation['help']}: {node['html'][:160]}"
        for violation in violations
        if violation["impact"] in ("serious", "critical")
        for node in violation["nodes"]
    ]
