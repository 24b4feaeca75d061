"""The documentation site. Its pages are the repository's Markdown files, each under the path that it has here.

So Sphinx's source folder is the repository, and ``make docs`` names this folder with ``-c``. A link from page to page
works as it stands, on a code host and on the site; ``docs/design/tests-and-docs.md`` has the
reasons. Links to code lead to pages too (``site/source_pages.py``), so no public address of the repository is needed.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "site"))

project = "VeOmni kernels"
author = "the VeOmni kernels contributors"
copyright = f"{author}, Apache License 2.0"

extensions = ["myst_parser", "sphinx_copybutton", "sphinxcontrib.mermaid", "source_pages"]
root_doc = "docs/index"
source_suffix = {".md": "markdown"}
exclude_patterns = [".*", "changes/*.*.md", "docs/_build", "runs", "build", "dist"]

myst_heading_anchors = 4  # headings are linked by the names that scripts/check_links.py and code hosts give them
myst_fence_as_directive = ["mermaid"]
mermaid_height = "auto"  # as high as its width makes it, so that its text can be read
myst_enable_extensions = ["dollarmath"]
myst_dmath_allow_space = False  # or two sums in dollars would be a formula
myst_dmath_allow_digits = False

# The repository's public address, such as "https://host/owner/name/". With it, each page links to its own source there.
repository = ""

html_theme = "furo"
html_title = project
html_theme_options = {"source_repository": repository, "source_branch": "main", "source_directory": ""}
html_static_path = ["site/static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_additional_pages = {"index": "redirect.html"}  # the start page is docs/index.html
html_copy_source = False
templates_path = ["site/templates"]

copybutton_prompt_text = "$ "
