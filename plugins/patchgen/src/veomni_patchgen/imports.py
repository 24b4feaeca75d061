"""Imports at the top level of a module: what each name stands for, absolute ones for relative, names left out."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import libcst as cst
from libcst.helpers import get_absolute_module_from_package_for_import, get_full_name_for_node

Imported = tuple[str, str | None]
"""A module, and a name of it; ``None`` for the module itself."""


def parse_statement(code: str) -> cst.BaseStatement:
    """The one statement in ``code``."""
    return cst.parse_module(code).body[0]


def absolute(statement: Any, package: str) -> Any:
    """``statement`` with the relative imports in it made absolute; ``package`` is that of its module."""
    return statement.visit(_Absolute(package))


def without_names(statement: Any, names: Collection[str]) -> Any | None:
    """``statement`` without its imports of ``names``; ``None`` if nothing stays of it."""
    left = statement.visit(_Without(names))
    return None if isinstance(left, cst.RemovalSentinel) else left


def imported_names(statement: Any, package: str) -> dict[str, Imported]:
    """What each name stands for that an import in ``statement`` binds, inside ``if`` and ``try`` too."""
    found = _Found(package)
    statement.visit(found)
    return found.names


def has_import(statement: Any) -> bool:
    """Whether an import is in ``statement``, outside functions and classes."""
    return bool(imported_names(statement, "")) or _is_star(statement)


def import_of(name: str, target: Imported) -> cst.BaseStatement:
    """The statement that binds ``name`` to ``target``."""
    module, attribute = target
    if attribute is None:
        plain = name == module or name == module.partition(".")[0]
        return parse_statement(f"import {module}" + ("" if plain else f" as {name}"))
    return parse_statement(f"from {module} import {attribute}" + ("" if attribute == name else f" as {name}"))


def _is_star(statement: Any) -> bool:
    return isinstance(statement, cst.SimpleStatementLine) and any(
        isinstance(each, cst.ImportFrom) and isinstance(each.names, cst.ImportStar) for each in statement.body
    )


def _bound(alias: cst.ImportAlias) -> str:
    if alias.asname is not None:
        return cst.ensure_type(alias.asname.name, cst.Name).value
    return str(get_full_name_for_node(alias.name)).partition(".")[0]


class _Absolute(cst.CSTTransformer):
    def __init__(self, package: str) -> None:
        self._package = package

    def leave_ImportFrom(self, original_node: cst.ImportFrom, updated_node: cst.ImportFrom) -> cst.ImportFrom:
        if not original_node.relative:
            return updated_node
        module = get_absolute_module_from_package_for_import(self._package, original_node)
        name: Any = cst.parse_expression(str(module))
        space = cst.SimpleWhitespace(" ")
        return updated_node.with_changes(module=name, relative=(), whitespace_after_from=space)


class _Without(cst.CSTTransformer):
    def __init__(self, names: Collection[str]) -> None:
        self._names = names

    def visit_FunctionDef(self, node: cst.FunctionDef) -> bool:
        return False

    def visit_ClassDef(self, node: cst.ClassDef) -> bool:
        return False

    def leave_ImportFrom(self, original_node: Any, updated_node: Any) -> Any:
        return updated_node if isinstance(updated_node.names, cst.ImportStar) else self._kept(updated_node)

    def leave_Import(self, original_node: Any, updated_node: Any) -> Any:
        return self._kept(updated_node)

    def _kept(self, node: Any) -> Any:
        kept = [alias for alias in node.names if _bound(alias) not in self._names]
        if not kept:
            return cst.RemoveFromParent()
        if len(kept) == len(node.names):
            return node
        last = kept[-1].with_changes(comma=node.names[-1].comma)
        return node.with_changes(names=[*kept[:-1], last])


class _Found(cst.CSTVisitor):
    def __init__(self, package: str) -> None:
        self._package = package
        self.names: dict[str, Imported] = {}

    def visit_FunctionDef(self, node: cst.FunctionDef) -> bool:
        return False

    def visit_ClassDef(self, node: cst.ClassDef) -> bool:
        return False

    def visit_Import(self, node: cst.Import) -> None:
        for alias in node.names:
            whole = str(get_full_name_for_node(alias.name))
            self.names[_bound(alias)] = (whole, None)

    def visit_ImportFrom(self, node: cst.ImportFrom) -> None:
        if isinstance(node.names, cst.ImportStar):
            return
        if node.relative and self._package:
            module = str(get_absolute_module_from_package_for_import(self._package, node))
        else:
            module = str(get_full_name_for_node(node.module)) if node.module else ""
        for alias in node.names:
            self.names[_bound(alias)] = (module, str(get_full_name_for_node(alias.name)))
