"""A Sphinx extension: a page for each source file that a page links to.

A page links to code as files of the repository: ``[planner.py](../../core/src/veomni_core/planning/planner.py)``. MyST
would offer such a file as a download. Here it is a page of the site with coloured code, and a folder is a list of its
files. So the site needs no address of a public repository, and it shows the code that its text was written about.
What is in ``docs`` itself, and a benchmark's result file, stays a download.
"""

from __future__ import annotations

import html
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from pygments.lexers import get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.util.osutil import relative_uri

Page = tuple[str, dict[str, Any], str]


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_transform(LinksToSources)
    app.connect("html-collect-pages", source_pages)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}


class LinksToSources(SphinxTransform):
    """Turns MyST's links to files and folders outside of ``docs`` into links to their pages."""

    default_priority = 700

    def apply(self, **kwargs: Any) -> None:
        page = self.env.current_document.docname
        for node in [
            *self.document.findall(addnodes.download_reference),
            *self.document.findall(addnodes.pending_xref),
        ]:
            if node.get("refdomain") is not None:
                continue  # a link to another page
            path = (self.env.doc2path(page).parent / node["reftarget"]).resolve()
            if not path.exists() or not path.is_relative_to(self.env.srcdir):
                continue  # MyST warns of it
            source = path.relative_to(self.env.srcdir)
            if source.parts[0] == "docs" or source.suffix == ".json":
                continue
            # The metadata of a page is what Sphinx forgets with the page, and collects from parallel readers.
            self.env.metadata[page].setdefault("sources", []).append(source)
            link = nodes.reference("", "", *node.children, refuri=self._uri(page, source), internal=True)
            node.replace_self(link)

    def _uri(self, page: str, source: Path) -> str:
        return self.app.builder.get_relative_uri(page, page_name(source))


def page_name(source: Path) -> str:
    return f"source/{source.as_posix()}"


def source_pages(app: Sphinx) -> Iterator[Page]:
    """The pages of all linked files, and of those that linked folders list."""
    linked = {source for page in app.env.metadata.values() for source in page.get("sources", [])}
    folders = {source: files_in(app.srcdir, source) for source in linked if (app.srcdir / source).is_dir()}
    for folder, files in folders.items():
        yield _page(folder, _listing(folder, files))
    for source in sorted(linked.difference(folders).union(*folders.values())):
        code = (app.srcdir / source).read_text(encoding="utf-8")
        yield _page(source, app.builder.highlighter.highlight_block(code, language(source)))


def files_in(root: Path, folder: Path) -> list[Path]:
    """The Python files of a folder, at any depth."""
    return sorted(path.relative_to(root) for path in (root / folder).rglob("*.py"))


def language(source: Path) -> str:
    """The name of the language that a file is coloured as."""
    try:
        return get_lexer_for_filename(source.name).aliases[0]
    except ClassNotFound:
        return "text"


def _listing(folder: Path, files: list[Path]) -> str:
    here = page_name(folder)
    links = ((f"{relative_uri(here, page_name(file))}.html", file.relative_to(folder).as_posix()) for file in files)
    items = (f'<li><a href="{html.escape(target)}">{html.escape(text)}</a></li>' for target, text in links)
    return f"<ul>{''.join(items)}</ul>"


def _page(source: Path, body: str) -> Page:
    title = html.escape(source.as_posix())
    return page_name(source), {"title": title, "body": f"<h1><code>{title}</code></h1>\n{body}"}, "page.html"
