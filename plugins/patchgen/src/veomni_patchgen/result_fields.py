"""Whether a patch still passes what upstream passes to the classes that hold a model's outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import libcst as cst

from veomni_patchgen.errors import PatchError
from veomni_patchgen.source import Source, fields_of


def check_fields(title: str, code: Any, upstream: Any | None, source: Source, declared: bool) -> None:
    """Raise PatchError if ``code`` leaves out a field that ``upstream`` passes, or passes one that doesn't exist.

    Args:
        title: the patch's, for the message.
        code: the patch's code, with the names of the generated file.
        upstream: what it replaces; ``None`` where there was nothing.
        source: the modeling file.
        declared: whether the patch declares that it computes something else; then it may leave fields out.
    """
    before = _calls(upstream) if upstream is not None else {}
    for name, passed in _calls(code).items():
        fields = fields_of(name, source)
        if fields is None:
            continue
        if unknown := passed - fields - {"**"}:
            known = ", ".join(sorted(fields))
            line = source.line_of(name)
            where = f" (upstream's line {line})" if line else ""
            raise PatchError(f"{title}: {name}{where} has no field {', '.join(sorted(unknown))}. Its fields: {known}")
        lost = before.get(name, frozenset()) - passed
        if lost and "**" not in passed and not declared:
            raise PatchError(
                f"{title}: upstream passes {', '.join(sorted(lost))} to {name}, and the patch does not, so it would be "
                "lost. Pass it, or say why not with declares=..."
            )


def check_sibling_fields(
    title: str, code: Any, rename: Callable[[str], str], siblings: Iterable[Source], source: Source
) -> None:
    """Raise PatchError if a class of outputs that ``name_map`` exchanges has other fields than its sibling."""
    for name in _calls(code):
        new = rename(name)
        if new == name or (fields := fields_of(new, source)) is None:
            continue
        before = next(filter(None, (fields_of(name, each) for each in siblings)), None)
        if before is None:
            raise PatchError(
                f"{title}: name_map makes {new} of {name}, whose fields can't be compared: the module of the patch has "
                "no config whose source_module defines it"
            )
        if different := sorted(fields ^ before):
            raise PatchError(
                f"{title}: name_map makes {new} of {name}, but not both have {', '.join(different)}, which would be "
                "lost. Write a method of its own for this model"
            )


def _calls(code: Any) -> Mapping[str, frozenset[str]]:
    """Of each name that ``code`` calls, the keywords that it is passed; ``**`` for others."""
    found = _Calls()
    code.visit(found)
    return found.keywords


class _Calls(cst.CSTVisitor):
    def __init__(self) -> None:
        self.keywords: dict[str, frozenset[str]] = {}

    def visit_Call(self, node: cst.Call) -> None:
        if isinstance(node.func, cst.Name):
            passed = frozenset("**" if arg.star or not arg.keyword else arg.keyword.value for arg in node.args)
            self.keywords[node.func.value] = self.keywords.get(node.func.value, frozenset()) | passed
