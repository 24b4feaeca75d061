"""The page of environment variables has those that the sources read or set, and no other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.docs

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "reference" / "environment.md").read_text(encoding="utf-8")
# Of sysconf, a policy of FSDP, and instructions of Python.
OTHERS = {"SC_PAGE_SIZE", "SC_PHYS_PAGES", "TRANSFORMER_BASED_WRAP", "IMPORT_NAME", "EXTENDED_ARG"}
VARIABLE = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+|RANK|COLUMNS")


def in_sources() -> set[str]:
    """The strings that are written as variables are, in each file that knows of an environment."""
    found = set()
    for path in [*ROOT.glob("core/src/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py")]:
        text = path.read_text(encoding="utf-8")
        if "environ" in text:
            strings = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)]
            found |= {each for each in strings if isinstance(each, str) and VARIABLE.fullmatch(each)}
    return found


def test_the_page_has_every_variable():
    assert {*re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)} == in_sources() - OTHERS
