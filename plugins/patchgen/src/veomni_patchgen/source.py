"""Modules as text: where they are installed, what they define, without importing them."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import libcst as cst

from veomni_core.errors import did_you_mean
from veomni_patchgen.config import Patch
from veomni_patchgen.errors import PatchError
from veomni_patchgen.imports import Imported, imported_names
from veomni_patchgen.names import bound_names


@dataclass(frozen=True)
class Source:
    """The text of one module.

    Attributes:
        name: the module's dotted name.
        text: its source.
        version: that of the distribution it belongs to.
    """

    name: str
    text: str
    version: str = ""

    @property
    def package(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def digest(self) -> str:
        """The SHA-256 of the text."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @functools.cached_property
    def tree(self) -> cst.Module:
        try:
            return cst.parse_module(self.text)
        except cst.ParserSyntaxError as error:
            what = f"line {error.raw_line}: {error.message}"
            raise PatchError(f"{self.name} is no Python that can be read here, {what}") from None

    @functools.cached_property
    def statements(self) -> Mapping[str, cst.BaseStatement]:
        """The top-level statement that binds each name last; for an imported one, the import."""
        found: dict[str, Any] = {}
        for statement in self.tree.body:
            found |= dict.fromkeys(bound_names(statement), statement)
        return found

    @functools.cached_property
    def imports(self) -> Mapping[str, Imported]:
        """What each imported name stands for."""
        found: dict[str, Imported] = {}
        for statement in self.tree.body:
            found |= imported_names(statement, self.package)
        return found

    def line_of(self, name: str) -> int:
        """The line in which the class or function ``name`` begins; 0 if it is not defined here."""
        match = re.search(rf"^(class|def) {name}\b", self.text, re.MULTILINE)
        return self.text.count("\n", 0, match.start()) + 1 if match else 0

    def definition(self, name: str, kind: type[Any], what: str) -> Any:
        """The class or function ``name``.

        Raises:
            PatchError: there is none; the message has the nearest name.
        """
        found = self.statements.get(name)
        times = sum(getattr(getattr(each, "name", None), "value", None) == name for each in self.tree.body)
        if times > 1:
            raise PatchError(f"{self.name} defines {name} {times} times, and a patch can't say which one it is for")
        if isinstance(found, kind):
            return found
        known = [each for each, statement in self.statements.items() if isinstance(statement, kind)]
        raise PatchError(f"{self.name} has no {what} {name}. {did_you_mean(name, known)}")


def read_source(module: str) -> Source:
    """The installed source of ``module``. Nothing of it is run, and neither are its packages.

    Raises:
        PatchError: it is not installed.
    """
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    for folder in (spec.submodule_search_locations or () if spec else ()) if rest else ():
        for path in (Path(folder, *rest).with_suffix(".py"), Path(folder, *rest, "__init__.py")):
            if path.is_file():
                return _kept(module, read_code(path), _version(top))
    if spec and spec.has_location and spec.origin and not rest:
        return _kept(module, read_code(Path(spec.origin)), _version(top))
    raise PatchError(f"{module} is not installed here, so its code can't be read. Install it, or correct its name")


def read_code(path: Path) -> str:
    """The text of a Python file, in the encoding that it says.

    Raises:
        PatchError: it is no text, or says an encoding that it is not in.
    """
    try:
        return importlib.util.decode_source(path.read_bytes())
    except (SyntaxError, UnicodeDecodeError) as error:
        raise PatchError(f"{path} is no Python source that can be read: {error}") from None


@functools.lru_cache(maxsize=64)
def _kept(module: str, text: str, version: str) -> Source:
    return Source(module, text, version)  # which is parsed once


@functools.cache
def _version(top: str) -> str:
    try:
        return importlib.metadata.version(top)
    except importlib.metadata.PackageNotFoundError:
        return ""


def method_of(node: cst.ClassDef, name: str) -> cst.FunctionDef | None:
    """The method ``name`` in the body of a class."""
    return next(
        (each for each in node.body.body if isinstance(each, cst.FunctionDef) and each.name.value == name), None
    )


def lineage(name: str, source: Source) -> Iterator[tuple[Source, cst.ClassDef]]:
    """The class ``name`` and its ancestors whose source is that of the same distribution, near ones first."""
    node = source.statements.get(name)
    if isinstance(node, cst.ClassDef):
        yield source, node
        for base in node.bases:
            if isinstance(base.value, cst.Name):
                yield from lineage(base.value.value, source)
    elif name in source.imports:
        module, attribute = source.imports[name]
        if attribute and module.partition(".")[0] == source.name.partition(".")[0]:
            try:
                yield from lineage(attribute, read_source(module))
            except PatchError:
                return


def inherited_method(name: str, method: str, source: Source) -> tuple[Source, cst.ClassDef] | None:
    """The nearest class in the lineage of ``name`` that has ``method`` in its body."""
    return next((each for each in lineage(name, source) if method_of(each[1], method)), None)


def fields_of(name: str, source: Source) -> frozenset[str] | None:
    """The fields of the dataclass ``name``, inherited ones included; ``None`` if it is none."""
    found: set[str] = set()
    is_dataclass = False
    for _, node in lineage(name, source):
        is_dataclass |= any("dataclass" in cst.Module([]).code_for_node(each.decorator) for each in node.decorators)
        for line in node.body.body:
            for each in line.body if isinstance(line, cst.SimpleStatementLine) else ():  # not a method's
                if isinstance(each, cst.AnnAssign) and isinstance(each.target, cst.Name):
                    found.add(each.target.value)
    return frozenset(found) if is_dataclass else None


def inherited_code(patches: Iterable[Patch], source: Source) -> dict[str, tuple[str, str]]:
    """Of each patch of a method that another file gives upstream's class: where that is, and a hash of its code."""
    found = {}
    for patch in patches:
        owner, _, name = patch.target.partition(".")
        if name and (there := inherited_method(owner, name, source)) and there[0].name != source.name:
            code = cst.Module([method_of(there[1], name)]).code  # type: ignore[list-item]
            where = f"{there[1].name.value}.{name} of {there[0].name}"
            found[patch.target] = (where, hashlib.sha256(code.encode()).hexdigest()[:16])
    return found
