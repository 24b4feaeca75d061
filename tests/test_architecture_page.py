"""The architecture page and the glossary say what the sources say: the drawing, and the names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import draw_architecture

pytestmark = pytest.mark.docs

ROOT = Path(__file__).resolve().parent.parent
PAGE = draw_architecture.PAGE.read_text(encoding="utf-8")
GLOSSARY = (ROOT / "docs" / "explanation" / "glossary.md").read_text(encoding="utf-8")
WORDS = re.findall(r"^\| ([^|]+) \| [^|]+ \| ([^|]+) \|$", GLOSSARY, re.MULTILINE)


def names_in(path: Path) -> set[str]:
    """Every class, function, attribute and imported name that a file defines."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
    return found


PACKAGES = {path.name: path for path in (draw_architecture.CORE, *ROOT.glob("plugins/*/src/veomni_*"))}
FILES = [file for package in PACKAGES.values() for file in package.rglob("*.py")]
NAMES = {name for file in FILES for name in names_in(file)}


def test_the_drawing_is_what_the_sources_give():
    assert draw_architecture.with_drawing(PAGE) == PAGE, "run: make generate"


def test_a_group_imports_only_from_groups_below_it():
    grouped = draw_architecture.GROUPS
    order = list(grouped)
    for importer, imported in draw_architecture.arrows(grouped).items():
        if importer in order:
            assert all(order.index(importer) < order.index(group) for group in imported), importer


def test_a_group_that_imports_upwards_is_seen():
    grouped = draw_architecture.GROUPS
    moved = {**grouped, "Foundations": (*grouped["Foundations"], "planning/"), "Planning": ()}
    with pytest.raises(SystemExit, match="groups import each other"):
        draw_architecture.arrows(moved)


def test_a_module_without_a_group_is_named():
    grouped = {**draw_architecture.GROUPS, "Kernels": ()}
    with pytest.raises(SystemExit, match=r"\['kernels/'\]"):
        draw_architecture.arrows(grouped)


def is_in_the_code(name: str) -> bool:
    """Whether ``name`` is a module of ours, a name in one (``module.name``), or a file of the repository."""
    if "/" in name:
        return any(ROOT.glob(name))
    *path, last = name.split(".")
    if path and path[0] in PACKAGES:
        module = PACKAGES[path[0]].joinpath(*path[1:])
        inside = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
        return any(module.glob(f"{last}*")) or last in names_in(inside)
    return {*path, last} <= NAMES | {file.stem for file in FILES} | PACKAGES.keys()


@pytest.mark.parametrize("word, code", WORDS, ids=[word for word, _ in WORDS])
def test_the_glossary_s_names_are_in_the_code(word, code):
    assert not [name for name in re.findall(r"`([^`]+)`", code) if not is_in_the_code(name)]


def test_a_name_that_is_not_in_the_code_is_seen():
    there = {
        "Plan",
        "Plan.autocast",
        "veomni_core.tables.render_table",
        "veomni_transformers.proving.probe",
        "plugins/transformers/tests/lookalikes.py",
    }
    gone = {
        "Plam",
        "Plan.autocats",
        "veomni_core.tables.render_tablet",
        "veomni_core.sites.proofs",
        "core/tests/lookalike.py",
    }
    assert {name for name in there | gone if is_in_the_code(name)} == there
