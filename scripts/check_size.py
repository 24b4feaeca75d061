"""Holds the repository to its size: lines of the core and of all sources, words of its pages, imports past the faces.

Each limit is what there is: it falls with what is taken out, and rises only with a feature, in the commit that merges
it. Prints each measure, and exits with 1 if one is over its limit.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The faces of the core, from which plugins import; anything else of it is a deep import.
FACES = ("authoring", "commands", "errors", "kernels")
_DEEP = re.compile(rf"^\s*(?:from|import) veomni_core\.(?!(?:{'|'.join(FACES)})\b)", re.MULTILINE)
_FAMILY = ("ops", "transformers", "conformance", "tools")
LIMITS = {
    "lines of core/src": 8_500,
    "lines of all sources": 100_579,  # 64,000 is the aim
    "words of all pages": 61_135,
    "deep imports of the core in other plugins": 3,
}


def measures() -> dict[str, int]:
    """What there is, under the names of ``LIMITS``."""
    core = sorted(ROOT.glob("core/src/**/*.py"))
    plugins = sorted(ROOT.glob("plugins/*/src/**/*.py"))
    others = [path for path in plugins if path.relative_to(ROOT).parts[1] not in _FAMILY]
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    pages = [ROOT / name for name in listed.stdout.splitlines()]
    found = (
        sum(len(_text(path).splitlines()) for path in core),
        sum(len(_text(path).splitlines()) for path in (*core, *plugins)),
        sum(len(_text(page).split()) for page in pages if page.exists()),
        sum(len(_DEEP.findall(_text(path))) for path in others),
    )
    return dict(zip(LIMITS, found, strict=True))


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def main() -> int:
    over = False
    for name, found in measures().items():
        over |= found > LIMITS[name]
        print(f"{name}: {found} of {LIMITS[name]}{', too many' if found > LIMITS[name] else ''}")
    return int(over)


if __name__ == "__main__":
    sys.exit(main())
