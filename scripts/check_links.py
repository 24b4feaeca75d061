"""Checks that every relative link in the repository's Markdown leads to a file, and every anchor to a heading.

A page that the site's build generates counts as there. The build checks the anchors of such pages.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from generated import generated_pages

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
FENCED = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """The names that a page's headings can be linked by."""
    headings = re.findall(r"^#+\s+(.*?)\s*$", FENCED.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def problems(page: Path) -> list[str]:
    """The links of ``page`` that lead nowhere."""
    broken = []
    for target in LINK.findall(FENCED.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        aim = (page.parent / path).resolve() if path else page
        if aim in generated_pages():
            continue
        if not aim.exists():
            broken.append(f"{page.relative_to(ROOT)}: {target} leads nowhere")
        elif anchor and aim.suffix == ".md" and anchor not in anchors(aim.read_text(encoding="utf-8")):
            broken.append(f"{page.relative_to(ROOT)}: {aim.name} has no heading #{anchor}")
    return broken


def main() -> int:
    command = ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", "*.md"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    broken = [problem for page in listed for problem in problems(ROOT / page)]
    print("\n".join(broken) or f"links of {len(listed)} pages lead somewhere")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
