"""The names of a piece of code, by scope: which it binds, which it takes from outside, and how they are renamed."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import libcst as cst
from libcst.metadata import GlobalScope, MetadataWrapper, ScopeProvider

from veomni_patchgen.imports import imported_names

BUILTINS = frozenset(dir(builtins)) | {"__file__", "__name__", "__doc__", "__spec__", "__package__"}


def bound_names(statement: cst.BaseStatement) -> frozenset[str]:
    """The names that ``statement``, at the top level of a module, binds there."""
    if isinstance(statement, (cst.ClassDef, cst.FunctionDef)):
        return frozenset([statement.name.value])
    if _is_import(statement):  # without the scopes, which take long
        return frozenset(imported_names(statement, ""))
    return frozenset(
        assignment.name
        for scope in _scopes(_read(statement))
        if isinstance(scope, GlobalScope)
        for assignment in scope.assignments
    )


def _is_import(statement: Any) -> bool:
    return isinstance(statement, cst.SimpleStatementLine) and all(
        isinstance(each, (cst.Import, cst.ImportFrom)) and not isinstance(each.names, cst.ImportStar)
        for each in statement.body
    )


def free_names(statement: cst.BaseStatement) -> frozenset[str]:
    """The names that ``statement`` takes from its module or from Python, in annotations in quotes too."""
    if _is_import(statement):
        return frozenset()
    return frozenset(name for name, _ in _free(_read(statement)))


def immediate_names(statement: cst.BaseStatement) -> frozenset[str]:
    """Those of :func:`free_names` that are looked up when the module is imported.

    Names in function bodies and in quotes are not.
    """
    if _is_import(statement):
        return frozenset()
    left: Any = statement.visit(_WithoutBodies())
    return frozenset(name for name, node in _free(_read(left)) if isinstance(node, cst.Name))


def renamed(statement: Any, new_name: Callable[[str], str]) -> Any:
    """``statement`` with every name that it takes from its module, its own included, as ``new_name`` gives it.

    Local names, attributes and keywords that are spelt alike stay.
    """
    wrapper = MetadataWrapper(cst.Module([statement]))
    nodes = {id(node): new_name(name) for name, node in _free(wrapper) if isinstance(node, cst.Name)}
    quoted = {id(node): node for _, node in _free(wrapper) if isinstance(node, cst.SimpleString)}
    # The statement's own name, and names of imports, are bound rather than used.
    top = wrapper.module.body[0]
    if isinstance(top, (cst.ClassDef, cst.FunctionDef)):
        nodes[id(top.name)] = new_name(top.name.value)
    return wrapper.module.visit(_Rename(nodes, quoted, new_name)).body[0]


def new_prefix(names: Mapping[str, str]) -> Callable[[str], str]:
    """What a ``name_map`` makes of a name: the longest prefix that it has is exchanged, unless it has the new one.

    Example:
        >>> rename = new_prefix({"Qwen3VL": "Qwen3VLMoe"})
        >>> rename("Qwen3VLModel"), rename("Qwen3VLMoeModel"), rename("torch")
        ('Qwen3VLMoeModel', 'Qwen3VLMoeModel', 'torch')
    """

    def rename(name: str) -> str:
        for old in sorted(names, key=len, reverse=True):
            if name.startswith(old):
                return name if name.startswith(names[old]) else names[old] + name[len(old) :]
        return name

    return rename


def source_of(*nodes: Any) -> str:
    """The nodes as code."""
    return cst.Module(list(nodes)).code


def _read(statement: Any) -> MetadataWrapper:
    """``statement`` as a module that is only read: it needs no copy."""
    return MetadataWrapper(cst.Module([statement]), unsafe_skip_copy=True)


def _scopes(wrapper: MetadataWrapper) -> set[Any]:
    return {scope for scope in wrapper.resolve(ScopeProvider).values() if scope is not None}


def _free(wrapper: MetadataWrapper) -> Iterator[tuple[str, cst.CSTNode]]:
    for scope in _scopes(wrapper):
        for access in scope.accesses:
            if any(not isinstance(each.scope, GlobalScope) and type(each).__name__ != "BuiltinAssignment"
                   for each in access.referents):  # fmt: skip
                continue
            node = access.node
            if isinstance(node, cst.SimpleString):
                for name in _quoted_names(node):
                    yield name, node
                continue
            while isinstance(node, cst.Attribute):
                node = node.value
            if isinstance(node, cst.Name):
                yield node.value, node


def _quoted_names(node: cst.SimpleString) -> Iterator[str]:
    try:
        expression = cst.parse_expression(str(node.evaluated_value))
    except cst.ParserSyntaxError:
        return
    statement = cst.SimpleStatementLine([cst.Expr(expression)])
    yield from (name for name, _ in _free(_read(statement)))


class _Rename(cst.CSTTransformer):
    def __init__(self, nodes: Mapping[int, str], quoted: Mapping[int, Any], new_name: Callable[[str], str]) -> None:
        self._nodes, self._quoted, self._new_name = nodes, quoted, new_name

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.Name:
        new = self._nodes.get(id(original_node), updated_node.value)
        return updated_node if new == updated_node.value else updated_node.with_changes(value=new)

    def leave_SimpleString(self, original_node: cst.SimpleString, updated_node: cst.SimpleString) -> cst.SimpleString:
        if id(original_node) not in self._quoted:
            return updated_node
        line = cst.SimpleStatementLine([cst.Expr(cst.parse_expression(str(original_node.evaluated_value)))])
        inner = source_of(renamed(line, self._new_name)).strip()
        return updated_node.with_changes(value=f"{original_node.quote}{inner}{original_node.quote}")


class _WithoutBodies(cst.CSTTransformer):
    def leave_FunctionDef(self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef) -> cst.FunctionDef:
        return updated_node.with_changes(body=cst.SimpleStatementSuite([cst.Expr(cst.Ellipsis())]))

    def leave_Lambda(self, original_node: cst.Lambda, updated_node: cst.Lambda) -> cst.BaseExpression:
        return cst.Ellipsis()
