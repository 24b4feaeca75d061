"""What patches use of their own module: it comes along into the generated file, or an error names it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import libcst as cst

from veomni_core.errors import did_you_mean
from veomni_patchgen.classes import with_marker
from veomni_patchgen.config import REPLACE_CLASS, REPLACE_FUNCTION, External, Patch, PatchConfig
from veomni_patchgen.errors import PatchError
from veomni_patchgen.imports import Imported, absolute, parse_statement
from veomni_patchgen.module_text import ModuleText
from veomni_patchgen.names import BUILTINS, bound_names, free_names, renamed
from veomni_patchgen.patch_file import PatchFile
from veomni_patchgen.source import Source, read_source
from veomni_transformers.generated_modeling import OwnClasses

Rename = Callable[[str], str]


class Supplies:
    """Brings imports and helpers into ``module``, once each."""

    def __init__(self, module: ModuleText, patches: Iterable[Patch]) -> None:
        self.module = module
        self.notes: list[str] = []
        self._origin: dict[str, Any] = {}  # of each helper: its statement in the patches' module
        self._targets = {
            id(patch.replacement): patch.target
            for patch in patches
            if patch.kind in (REPLACE_CLASS, REPLACE_FUNCTION) and not isinstance(patch.replacement, External)
        }

    def name_in_module(self, file: PatchFile, name: str, mapped: Rename) -> str:
        """What ``name`` of a patch's module is called in the generated file."""
        return self._targets.get(id(vars(file.module).get(name, self)), mapped(name))

    def siblings(self, file: PatchFile) -> list[Source]:
        """The modeling files that the configs in ``file`` patch."""
        return [read_source(name) for name in self._patched_by(file)]

    def add_imports(self, config: PatchConfig) -> None:
        """Take over what ``add_import`` has added."""
        for each in config.additional_imports:
            if not each.names:
                name = each.alias or each.module.partition(".")[0]
                self.import_name(name, (each.module, None), f"add_import {each.module}")
            for attribute, alias in each.names:
                self.import_name(alias or attribute, (each.module, attribute), f"add_import {each.module}")

    def check_own_imports(self, config: PatchConfig) -> None:
        """Raise PatchError if nothing uses a name that this config (not an inherited one) imports."""
        module = self.module
        used = frozenset().union(*map(free_names, (*module.statements, *module.blocks, *module.helpers.values())))
        for each in config.additional_imports:
            for name in [alias or name for name, alias in each.names] or [each.alias or each.module.partition(".")[0]]:
                if name not in used and each.owner == config.target_file:
                    raise PatchError(f"add_import {each.module}: nothing uses {name}; remove it")
                if name not in used:
                    module.imports.pop(name, None)

    def import_name(self, name: str, target: Imported, title: str) -> None:
        """Bind ``name`` to ``target`` by an import; nothing is done where it is already bound so.

        Raises:
            PatchError: the name already means something else.
        """
        upstream = self.module.source.imports.get(name) if self.module.defines(name) else None
        other = self.module.imports.get(name) or upstream
        if other is None and self.module.defines(name):
            raise PatchError(
                f"{title}: {name} is defined in {self.module.source.name} itself; import it under another name"
            )
        if other is not None and not _alike(other, target):
            raise PatchError(f"{title}: {name} is {_shown(target)}, but in the generated file it is {_shown(other)}")
        if other is None:
            self.module.imports[name] = target

    def build_own_classes(self) -> None:
        """Let ``AutoModel`` build the generated file's classes: upstream's parts would come without their patches."""
        module = self.module
        used = frozenset().union(*map(free_names, (*module.statements, *module.helpers.values())))
        for name, (where, _) in module.source.imports.items():
            if name.startswith("AutoModel") and where.startswith("transformers.models.auto") and name in used:
                self.import_name("OwnClasses", (OwnClasses.__module__, "OwnClasses"), name)
                line = parse_statement(f"{name} = OwnClasses({name}, globals())")
                why = f"patchgen: {name} builds the classes of this file, with their patches, not upstream's"
                module.blocks.append(with_marker(line, [why]))
                self.notes.append(f"{name} builds the classes of this file")

    def add_helper(self, helper: Any) -> None:
        """Put a helper and what it uses into the file."""
        file = PatchFile.of(helper)
        name = helper.__name__
        self._help(file, name, file.code_of(helper), str, f"add_helper {name}")

    def bring(self, file: PatchFile, node: Any, rename: Rename, title: str) -> None:
        """Bring what ``node``, of the patches' module ``file``, uses of it.

        Raises:
            PatchError: a name means nothing in the generated file, or something else.
        """
        for name in sorted(free_names(node) - bound_names(node)):
            self._need(file, name, rename, title)

    def _need(self, file: PatchFile, name: str, rename: Rename, title: str) -> None:
        wanted, module = rename(name), self.module
        own, imported = file.source.statements.get(name), file.source.imports.get(name)
        if imported and not _is_plain(own):  # in `try` or `if`, which comes along whole
            upstream = module.source.imports.get(wanted) if module.defines(wanted) else None
            if upstream and _alike(upstream, imported):
                return
            imported = None
        if wanted in self._targets.values() and wanted != name:
            return
        if imported and (there := _patches_in(imported[0])) and imported[1]:
            self._need(there, imported[1], lambda _: wanted, title)
        elif imported and imported[0] in self._patched_by(file) | {module.source.name}:
            if not module.defines(wanted):
                raise PatchError(f"{title} uses {wanted}. {self._nearest(wanted)}")
        elif imported:
            self.import_name(wanted, imported, title)
        elif own is not None:
            if isinstance(vars(file.module).get(name), PatchConfig):
                raise PatchError(f"{title} uses {name}, a config, which there is none of in the generated file")
            if self._targets.get(id(vars(file.module).get(name, self))) == wanted:
                return
            if name not in module.helpers and module.defines(wanted):
                raise PatchError(
                    f"{title} uses {name} of its own module, but {module.source.name} has a {wanted} too: rename yours"
                )
            self._help(file, wanted, own, rename, title)
        elif wanted not in module.names() and wanted not in BUILTINS:
            raise PatchError(
                f"{title} uses {wanted}, which nothing binds. {self._nearest(wanted, file.source.statements)}"
            )

    def _help(self, file: PatchFile, name: str, statement: Any, rename: Rename, title: str) -> None:
        before = self._origin.setdefault(name, statement)
        if name in self.module.helpers:
            if before is not statement and not before.deep_equals(statement):
                raise PatchError(f"{title}: two helpers are called {name}; rename one")
            return
        thing = vars(file.module).get(name)
        code = (
            file.code_of(thing)
            if getattr(thing, "__module__", "") == file.module.__name__ and _is_code(thing)
            else statement
        )
        self.module.helpers |= dict.fromkeys(
            bound_names(statement), absolute(renamed(code, rename), file.source.package)
        )
        self.notes.append(f"came along with {title}: {name}")
        self.bring(file, code, rename, f"{name}, which {title} uses,")

    def _nearest(self, name: str, others: Iterable[str] = ()) -> str:
        return did_you_mean(name, {*self.module.names(), *others})

    def _patched_by(self, file: PatchFile) -> set[str]:
        return {value.source_module for value in vars(file.module).values() if isinstance(value, PatchConfig)}


def _is_plain(statement: Any) -> bool:
    """Whether an import is alone in its line, or is there for annotations (``if TYPE_CHECKING``)."""
    if isinstance(statement, cst.If):
        return "TYPE_CHECKING" in cst.Module([]).code_for_node(statement.test)
    return isinstance(statement, cst.SimpleStatementLine)


def _is_code(thing: Any) -> bool:
    return hasattr(thing, "__qualname__") and "." not in thing.__qualname__


def _patches_in(name: str) -> PatchFile | None:
    """The file of module ``name`` if it has patches, so that a generated file must not import it."""
    module = sys.modules.get(name)
    if module is None or not any(isinstance(value, PatchConfig) for value in vars(module).values()):
        return None
    return PatchFile.of(module)


def _alike(one: Imported, other: Imported) -> bool:
    """Whether both are the same: libraries give one thing in several of their modules."""
    if _shown(one) == _shown(other):  # `from torch import nn` is `import torch.nn as nn`
        return True
    tops = {each[0].partition(".")[0] for each in (one, other)}
    return len(tops) == 1 and one[1] is not None and one[1] == other[1]


def _shown(target: Imported) -> str:
    return f"{target[0]}.{target[1]}" if target[1] else target[0]
