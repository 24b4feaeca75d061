"""The generated module while it is put together: statements of upstream, of patches, and what comes with them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import libcst as cst

from veomni_core.errors import did_you_mean
from veomni_patchgen.errors import PatchError
from veomni_patchgen.imports import Imported, absolute, has_import, import_of, imported_names, without_names
from veomni_patchgen.names import BUILTINS, bound_names, free_names, immediate_names
from veomni_patchgen.source import Source

_PUBLIC = "__all__"
_LISTS = (_PUBLIC, "_no_split_modules")


class ModuleText:
    """Statements in their order; names say what is found, replaced and left out."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.statements: list[Any] = [absolute(each, source.package) for each in source.tree.body]
        self.imports: dict[str, Imported] = {}
        self.blocks: list[Any] = []
        self.helpers: dict[str, Any] = {}
        self.left_out: list[str] = []
        self._used: dict[int, tuple[Any, frozenset[str]]] = {}
        self._bound: dict[int, tuple[Any, frozenset[str]]] = {}
        self._users_before = {name: True for each in self.statements for name in self._uses(each) - self._binds(each)}

    def names(self) -> frozenset[str]:
        """Everything that the module binds."""
        everything = (*self.statements, *self.blocks, *self.helpers.values())
        return frozenset(self.imports).union(*map(self._binds, everything))

    def defines(self, name: str) -> bool:
        """Whether a statement of upstream's, still here, defines or imports ``name``."""
        return any(name in self._binds(each) for each in self.statements)

    def get(self, name: str) -> Any:
        return self.statements[self._index(name)]

    def replace(self, name: str, node: Any) -> None:
        self.statements[self._index(name)] = node

    def drop_imports(self, names: Iterable[str]) -> None:
        """Leave upstream's imports of ``names`` out.

        Raises:
            PatchError: upstream does not import one of them.
        """
        for name in names:
            imported = [each for each in self.statements if name in imported_names(each, self.source.package)]
            if not imported:
                known = self.source.imports
                raise PatchError(
                    f"drop_import_names: {self.source.name} imports no {name}. {did_you_mean(name, known)}"
                )
            self.statements = [
                kept for each in self.statements
                if (kept := without_names(each, {name}) if each in imported else each) is not None
            ]  # fmt: skip

    def exclude(self, names: Iterable[str]) -> None:
        """Leave upstream's definitions of ``names`` out, and their strings in ``__all__``."""
        for name in names:
            try:
                self.source.definition(name, (cst.ClassDef, cst.FunctionDef), "class or function")  # type: ignore[arg-type]
            except PatchError as error:
                raise PatchError(f"exclude_from_output: {error}") from None
            del self.statements[self._index(name)]

    def leave_out_unused(self) -> None:
        """Leave out, again and again, what something used before, nothing uses any more, and nobody can import."""
        public = self._public()
        while True:
            used = frozenset().union(*(self._uses(each) - self._binds(each) for each in self._everything()))
            dead = [
                name for each in self.statements for name in sorted(self._binds(each))
                if name in self._users_before and name not in used | public and name != _PUBLIC and _removable(each)
            ]  # fmt: skip
            if not dead:
                return
            self.left_out += dead
            self.statements = [kept for each in self.statements if (kept := _less(each, dead)) is not None]

    def filter_lists(self, excluded: Iterable[str]) -> None:
        """Take the names that were left out from ``__all__``, and from classes' ``_no_split_modules``."""
        listed = _Listed({*excluded, *self.left_out})
        self.statements = [
            each.visit(listed) if isinstance(each, cst.ClassDef) or _PUBLIC in self._binds(each) else each
            for each in self.statements
        ]

    def check_references(self, gone: Iterable[str]) -> None:
        """Raise PatchError if a name is used that nothing binds, or text that names a class which was left out."""
        known, missing = self.names() | BUILTINS, set(gone)
        problems: dict[str, list[str]] = {}
        for each in self._everything():
            for name in sorted(self._uses(each) - known):
                problems.setdefault(name, []).extend(_users(each, name))
            for name in sorted(_texts(each) & missing):
                problems.setdefault(name, []).extend(_users(each, name))
        if problems:
            listed = "; ".join(f"{name}, in {', '.join(dict.fromkeys(users))}" for name, users in problems.items())
            raise PatchError(
                f"{self.source.name}: what is left still refers to {listed}. Override those methods, exclude the "
                "classes too, or import the name"
            )

    def finished(self) -> list[Any]:
        """The statements in their final order: imports, blocks, helpers where they can stand, and the rest.

        Raises:
            PatchError: a name is used on import before it is bound.
        """
        last = max((index for index, each in enumerate(self.statements) if has_import(each)), default=-1) + 1
        added = [import_of(name, target) for name, target in self.imports.items()]
        body = [*self.statements[:last], *added, *self.blocks]
        waiting = list(dict.fromkeys(self.helpers.values()))
        rest = list(self.statements[last:])
        while waiting or rest:
            ready = next((each for each in waiting if self._can_stand(each, body)), None)
            if ready is not None:
                waiting.remove(ready)
                body.append(ready)
            elif rest:
                body.append(rest.pop(0))
            else:
                needs = sorted(immediate_names(waiting[0]) - BUILTINS - frozenset().union(*map(self._binds, body)))
                raise PatchError(f"{', '.join(self._binds(waiting[0]))} needs {', '.join(needs)} before it is defined")
        return self._in_order(body)

    def _in_order(self, body: list[Any]) -> list[Any]:
        if "annotations" in self.source.imports:  # of __future__: annotations are not looked up
            return body
        bound: set[str] = set(BUILTINS)
        for each in body:
            late = immediate_names(each) - bound - self._binds(each)
            if late and isinstance(each, (cst.ClassDef, cst.FunctionDef)):
                raise PatchError(f"{each.name.value} uses {', '.join(sorted(late))} on import, before it is defined")
            bound |= self._binds(each)
        return body

    def _can_stand(self, helper: Any, body: list[Any]) -> bool:
        bound = BUILTINS.union(*map(self._binds, body))
        return immediate_names(helper) - self._binds(helper) <= bound

    def _everything(self) -> list[Any]:
        return [*self.statements, *self.blocks, *self.helpers.values()]

    def _index(self, name: str) -> int:
        for index in reversed(range(len(self.statements))):
            if name in self._binds(self.statements[index]):
                return index
        raise PatchError(f"{name} was left out of {self.source.name}, so nothing can be put in its place")

    def _public(self) -> frozenset[str]:
        return _texts(self.get(_PUBLIC)) if self.defines(_PUBLIC) else frozenset()

    def _uses(self, node: Any) -> frozenset[str]:
        return _kept(self._used, node, free_names)

    def _binds(self, node: Any) -> frozenset[str]:
        return _kept(self._bound, node, bound_names)


def _kept(memory: dict[int, tuple[Any, frozenset[str]]], node: Any, compute: Any) -> frozenset[str]:
    if id(node) not in memory:
        memory[id(node)] = (node, compute(node))  # with the node, so that no other gets its id
    return memory[id(node)][1]


def _removable(statement: Any) -> bool:
    """Whether names of it can go: a definition, or an import that no condition guards."""
    if isinstance(statement, (cst.ClassDef, cst.FunctionDef)):
        return True
    return isinstance(statement, cst.SimpleStatementLine) and has_import(statement)


def _less(statement: Any, dead: list[str]) -> Any | None:
    if isinstance(statement, (cst.ClassDef, cst.FunctionDef)):
        return None if statement.name.value in dead else statement
    return without_names(statement, dead) if _removable(statement) else statement


def _users(statement: Any, name: str) -> list[str]:
    """The parts of ``statement`` that use ``name``: methods, the class's body, a function."""
    if not isinstance(statement, cst.ClassDef):
        return [", ".join(sorted(bound_names(statement))) or "a statement"]
    found = [
        f"{statement.name.value}.{each.name.value}"
        for each in statement.body.body
        if isinstance(each, cst.FunctionDef) and name in free_names(each) | _texts(each)
    ]
    return found or [statement.name.value]


def _texts(node: Any) -> frozenset[str]:
    found = _Texts()
    node.visit(found)
    return frozenset(found.texts)


class _Texts(cst.CSTVisitor):
    def __init__(self) -> None:
        self.texts: set[str] = set()

    def visit_SimpleString(self, node: cst.SimpleString) -> None:
        self.texts.add(str(node.evaluated_value))


class _Listed(cst.CSTTransformer):
    """Takes strings out of the lists that are assigned to :data:`_LISTS`."""

    def __init__(self, gone: set[str]) -> None:
        self._gone = gone

    def visit_FunctionDef(self, node: cst.FunctionDef) -> bool:
        return False

    def visit_Assign(self, node: cst.Assign) -> bool:
        return any(isinstance(each.target, cst.Name) and each.target.value in _LISTS for each in node.targets)

    def leave_Element(self, original_node: cst.Element, updated_node: cst.Element) -> Any:
        value = original_node.value
        named = isinstance(value, cst.SimpleString) and value.evaluated_value in self._gone
        return cst.RemoveFromParent() if named else updated_node
