"""Puts methods into classes: in place of one, or around one."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

import libcst as cst
from libcst.metadata import MetadataWrapper, ScopeProvider

from veomni_core.errors import did_you_mean
from veomni_patchgen.errors import PatchError
from veomni_patchgen.source import Source, inherited_method, lineage, method_of

_BOUND_OTHERWISE = {"staticmethod", "classmethod", "property", "cached_property"}


def with_marker(node: Any, marker: Sequence[str]) -> Any:
    """``node`` below the comment lines ``marker``, and below those that it has itself."""
    own = [line for line in node.leading_lines if line.comment is not None]
    lines = [cst.EmptyLine(comment=cst.Comment(f"# {line}")) for line in marker]
    return node.with_changes(leading_lines=[cst.EmptyLine(indent=False), *lines, *own])


def with_method(node: cst.ClassDef, method: cst.FunctionDef) -> cst.ClassDef:
    """The class with ``method`` in place of the one of that name, or after the others."""
    body = _lines(node)
    names = [each.name.value if isinstance(each, cst.FunctionDef) else "" for each in body]
    if method.name.value in names:
        body[names.index(method.name.value)] = method
    else:
        body.append(method)
    return node.with_changes(body=cst.IndentedBlock(body))


def overriding(node: cst.ClassDef, name: str, function: cst.FunctionDef) -> cst.FunctionDef:
    """``function`` as the method ``name``, with upstream's decorators unless it has its own."""
    before = method_of(node, name)
    decorators = function.decorators or (before.decorators if before else ())
    return function.with_changes(name=cst.Name(name), decorators=decorators)


def wrapped(node: cst.ClassDef, name: str, function: cst.FunctionDef, source: Source) -> cst.ClassDef:
    """The class whose method ``name`` is ``function``; its first argument becomes upstream's method by name.

    Raises:
        PatchError: upstream has no such method, or one that isn't called with ``self``.
    """
    owner, before = node.name.value, method_of(node, name)
    if before is not None:
        decorators = {
            getattr(getattr(each.decorator, "value", each.decorator), "value", "") for each in before.decorators
        }
        if decorators & _BOUND_OTHERWISE:
            raise PatchError(f"modify_method {owner}.{name}: it is a {min(decorators & _BOUND_OTHERWISE)}; override it")
        kept = f"_upstream_{name.strip('_')}"
        original = f"{owner}.{kept}"
        moved = before.with_changes(name=cst.Name(kept))
        node = node.with_changes(body=cst.IndentedBlock([moved if each is before else each for each in _lines(node)]))
    else:
        bases = [base.value.value for base in node.bases if isinstance(base.value, cst.Name)]
        having = [base for base in bases if inherited_method(base, name, source)]
        if not having and name != "__init__":
            raise PatchError(f"modify_method {owner}.{name}: neither {owner} nor an ancestor of it has {name}")
        text = cst.Module([]).code_for_node(node.bases[0].value)
        original = f"{having[0] if having else text}.{name}"
    return with_method(node, _calling(original, function).with_changes(name=cst.Name(name)))


def _calling(original: str, function: cst.FunctionDef) -> cst.FunctionDef:
    """``function`` without its first parameter, whose uses become ``original``."""
    if not function.params.params:
        raise PatchError(f"{function.name.value}: its first parameter is upstream's method, but it has none")
    wrapper = MetadataWrapper(cst.Module([function]))
    inside: Any = wrapper.module.body[0]
    scope: Any = wrapper.resolve(ScopeProvider)[inside.body.body[0]]
    first = inside.params.params[0].name.value
    used = {id(access.node) for access in scope[first] for access in access.references} if first in scope else set()
    changed: Any = wrapper.module.visit(_Replaced(used, cst.parse_expression(original))).body[0]
    if not used:
        raise PatchError(f"{function.name.value}: it never calls its first parameter, upstream's method; override it")
    if _only_calls(function, first):
        raise PatchError(f"{function.name.value} changes nothing: it only calls upstream's method. Remove the patch")
    return changed.with_changes(params=changed.params.with_changes(params=changed.params.params[1:]))


def _only_calls(function: cst.FunctionDef, first: str) -> bool:
    """Whether the body is a call of the first parameter with all others as they came."""
    found: Any = ast.parse(cst.Module([function.with_changes(decorators=())]).code).body[0]
    body = [each for each in found.body if not isinstance(getattr(each, "value", None), ast.Constant)]
    given = found.args
    names = [each.arg for each in (*given.posonlyargs, *given.args)][1:]
    names += [f"*{given.vararg.arg}"] if given.vararg else []
    names += [f"{each.arg}={each.arg}" for each in given.kwonlyargs]
    names += [f"**{given.kwarg.arg}"] if given.kwarg else []
    call = ast.dump(ast.parse(f"{first}({', '.join(names)})").body[0].value)  # type: ignore[attr-defined]
    return len(body) == 1 and ast.dump(getattr(body[0], "value", None) or body[0]) == call


def _lines(node: cst.ClassDef) -> list[Any]:
    """The statements in the class's body, without a ``pass`` or ``...`` that only fills it."""
    if isinstance(node.body, cst.SimpleStatementSuite):
        lines: list[Any] = [cst.SimpleStatementLine([each]) for each in node.body.body]
    else:
        lines = list(node.body.body)
    return [each for each in lines if not _fills(each)]


def _fills(line: Any) -> bool:
    if not isinstance(line, cst.SimpleStatementLine) or len(line.body) != 1:
        return False
    each = line.body[0]
    return isinstance(each, cst.Pass) or (isinstance(each, cst.Expr) and isinstance(each.value, cst.Ellipsis))


class _Replaced(cst.CSTTransformer):
    def __init__(self, nodes: set[int], value: Any) -> None:
        self._nodes, self._value = nodes, value

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> Any:
        return self._value.deep_clone() if id(original_node) in self._nodes else updated_node


def check_method(owner: str, name: str, new: bool, source: Source) -> None:
    """Raise PatchError unless the class ``owner`` has the method ``name``, or an ancestor of it, or it is new."""
    if new:
        if inherited_method(owner, name, source):
            raise PatchError(f"override_method {owner}.{name}: new=True, but upstream has it; leave new out")
        return
    if inherited_method(owner, name, source) is None:
        known = {
            each.name.value for _, node in lineage(owner, source) for each in node.body.body
            if isinstance(each, cst.FunctionDef)
        }  # fmt: skip
        raise PatchError(
            f"override_method {owner}.{name}: {source.name} has no such method. {did_you_mean(name, known)} "
            "For a method that upstream does not have, write new=True"
        )
