"""Draws who imports whom in ``docs/explanation/architecture.md``, from the sources and the page's table of modules.

The table says which modules form a group. The drawing has one node per group, and one per set of distributions that use
the same groups. An arrow means that the upper group imports the lower one. An arrow is left out where a path of other
arrows says the same. ``--write`` puts the drawing into the page; without it the drawing is printed.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "explanation" / "architecture.md"
CORE = ROOT / "core" / "src" / "veomni_core"
BEGIN, END = "<!-- drawing: python scripts/draw_architecture.py --write -->\n", "<!-- end of drawing -->"
ROW = re.compile(r"^\| \*\*(.+?)\*\* \| (.+?) \|", re.MULTILINE)

Arrows = dict[str, set[str]]


def groups(page: str) -> dict[str, tuple[str, ...]]:
    """The modules of each group, from the page's table; a folder is written with a slash at its end."""
    return {name: tuple(re.findall(r"`([\w/]+)`", modules)) for name, modules in ROW.findall(page)}


def core_modules() -> set[str]:
    """Every module and folder at the top of veomni_core, as the table writes them; not the package itself."""
    files = {path.stem for path in CORE.glob("*.py")} - {"__init__"}
    return files | {f"{path.parent.name}/" for path in CORE.glob("*/__init__.py")}


def public_names() -> dict[str, str]:
    """The module at the top of veomni_core from which each name of ``from veomni_core import name`` comes."""
    return {name: module for module, name in _imports(ast.parse((CORE / "__init__.py").read_text(encoding="utf-8")))}


def arrows(grouped: Mapping[str, tuple[str, ...]]) -> Arrows:
    """Which groups each group imports, and which groups each distribution imports.

    Raises:
        SystemExit: the table does not have every module once, or two groups import each other.
    """
    listed = [module for modules in grouped.values() for module in modules]
    if wrong := sorted({*listed} ^ core_modules()) or sorted({each for each in listed if listed.count(each) > 1}):
        raise SystemExit(f"the table of modules in {PAGE.name} must have each of these once, if it exists: {wrong}")
    group_of = {module.rstrip("/"): group for group, modules in grouped.items() for module in modules}
    names = public_names()
    found: Arrows = defaultdict(set, {group: set() for group in grouped})
    sources = [(group_of[_top(path, CORE)], path) for path in CORE.glob("**/*.py") if path != CORE / "__init__.py"]
    for source in ROOT.glob("plugins/*/src/*"):
        distribution = source.name.replace("_", "-")
        sources += [(distribution, path) for path in source.glob("**/*.py")]
    for importer, path in sources:
        for module, name in _imports(ast.parse(path.read_text(encoding="utf-8"))):
            top = module or names.get(name, name)
            if group_of[top] != importer:
                found[importer].add(group_of[top])
    try:
        tuple(TopologicalSorter(found).static_order())
    except CycleError as error:
        raise SystemExit(f"groups import each other: {' -> '.join(error.args[1])}") from None
    return dict(found)


def drawing(grouped: Mapping[str, tuple[str, ...]]) -> str:
    """The drawing, as a block of Mermaid."""
    found = arrows(grouped)
    users: dict[frozenset[str], list[str]] = defaultdict(list)
    for importer in sorted(found.keys() - grouped.keys()):
        users[frozenset(_without_detours(found, importer))].append(importer)
    lines = ["flowchart TD"]
    lines += [f'  {_id(names[0])}(["{"<br/>".join(names)}"])' for names in users.values()]
    lines += [
        f'  {_id(group)}["<b>{group}</b><br/>{_wrapped(modules)}"]' for group, modules in grouped.items() if modules
    ]
    lines += [
        f"  {_id(names[0])} --> {_id(group)}" for used, names in users.items() for group in grouped if group in used
    ]
    for importer in grouped:
        used = _without_detours(found, importer)
        lines += [f"  {_id(importer)} --> {_id(group)}" for group in grouped if group in used]
    return "```mermaid\n" + "\n".join(lines) + "\n```\n"


def with_drawing(page: str) -> str:
    """``page`` with the drawing of its own table between the markers."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{drawing(groups(page))}{END}{after}"


def _imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Of each import from veomni_core: the module at its top (empty for the package itself), and the name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == CORE.name:
            top = [*(node.module or "").split("."), ""][1]
            yield from ((top, alias.asname or alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            parts = [alias.name.split(".") for alias in node.names]
            yield from ((each[1], "") for each in parts if each[0] == CORE.name and len(each) > 1)


def _without_detours(found: Arrows, importer: str) -> set[str]:
    """The groups that ``importer`` imports, less those that one of the others leads to."""
    direct = found.get(importer, set())
    return direct - {further for each in direct for further in _reached(found, each)}


def _reached(found: Arrows, start: str) -> set[str]:
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        new = found.get(waiting.pop(), set()) - reached
        reached |= new
        waiting += new
    return reached


def _top(path: Path, package: Path) -> str:
    return path.relative_to(package).parts[0].removesuffix(".py")


def _wrapped(modules: tuple[str, ...], per_line: int = 3) -> str:
    lines = [modules[start : start + per_line] for start in range(0, len(modules), per_line)]
    return "<br/>".join(", ".join(line) for line in lines)


def _id(name: str) -> str:
    return re.sub(r"\W+", "_", name.lower())


def main() -> int:
    page = PAGE.read_text(encoding="utf-8")
    if "--write" in sys.argv[1:]:
        PAGE.write_text(with_drawing(page), encoding="utf-8")
    else:
        print(drawing(groups(page)), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
