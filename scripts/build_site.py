"""Builds the documentation site into docs/_build, and checks that every link within it leads somewhere.

First the generated pages of the reference are written; with ``--coverage`` the page of coverage too, in minutes.

A warning of Sphinx is an error. What Sphinx doesn't see is checked in the built pages: links of templates and of source
pages, pictures, styles and scripts, and every anchor.
"""

from __future__ import annotations

import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "docs" / "_build"
SITE = BUILD / "html"


class _Names(HTMLParser):
    """The anchors of a page, and what it links to or loads."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.targets: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.add(value)
            elif name in ("href", "src") and value:
                self.targets.add(value)


def build(coverage: bool = False) -> bool:
    """Writes the generated pages and runs Sphinx. Pages that haven't changed are kept from the last time.

    Returns whether Sphinx had nothing to say.
    """
    generate = [sys.executable, str(ROOT / "scripts" / "generate.py"), "--site", *["--coverage"] * coverage]
    subprocess.run(generate, cwd=ROOT, check=True)
    options = ["-b", "html", "--nitpicky", "--fail-on-warning", "--keep-going", "--quiet"]
    folders = ["-c", "docs", "-d", str(BUILD / "doctrees"), ".", str(SITE)]
    return subprocess.run([sys.executable, "-m", "sphinx", *options, *folders], cwd=ROOT).returncode == 0


def broken_links(site: Path) -> list[str]:
    """The links within a built site that lead nowhere."""
    pages = {path.resolve(): _Names(path) for path in sorted(site.rglob("*.html"))}
    broken = []
    for page, names in pages.items():
        for target in sorted(names.targets):
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            aim = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            anchor = unquote(parts.fragment)
            if not aim.is_file():
                broken.append(f"{page.relative_to(site.resolve())}: {target} leads nowhere")
            elif anchor and aim in pages and anchor not in pages[aim].anchors:
                broken.append(f"{page.relative_to(site.resolve())}: nothing has the anchor of {target}")
    return broken


def main() -> int:
    if not build("--coverage" in sys.argv[1:]):
        return 1
    broken = broken_links(SITE)
    print("\n".join(broken) or f"the site is in {SITE.relative_to(ROOT)}; its links lead somewhere")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
