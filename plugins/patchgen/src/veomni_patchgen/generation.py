"""Applies a config's patches to the source of a modeling file."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import libcst as cst

from veomni_core.errors import did_you_mean
from veomni_patchgen.classes import check_method, overriding, with_marker, with_method, wrapped
from veomni_patchgen.config import MODIFY, OVERRIDE, REPLACE_CLASS, REPLACE_FUNCTION, External, Patch, PatchConfig
from veomni_patchgen.errors import PatchError
from veomni_patchgen.imports import parse_statement
from veomni_patchgen.layout import formatted, with_head
from veomni_patchgen.module_text import ModuleText
from veomni_patchgen.names import new_prefix, renamed, source_of
from veomni_patchgen.patch_file import PatchFile
from veomni_patchgen.result_fields import check_fields, check_sibling_fields
from veomni_patchgen.source import Source, inherited_method, lineage, method_of, read_source
from veomni_patchgen.supplies import Supplies


@dataclass(frozen=True)
class Generated:
    """A modeling file that was generated.

    Attributes:
        config: what it was generated from.
        source: upstream's file.
        text: the generated code.
        notes: what was left out since nothing uses it any more, and what came along with the patches.
        is_formatted: whether ruff has formatted it.
    """

    config: PatchConfig
    source: Source
    text: str
    notes: tuple[str, ...]
    is_formatted: bool

    @property
    def diff(self) -> str:
        """The unified difference from upstream's file."""
        return difference(self.source, self.text, self.config.target_file)


def difference(source: Source, text: str, file: str) -> str:
    """The unified difference between upstream's file and ``text``."""
    lines = difflib.unified_diff(
        source.text.splitlines(keepends=True), text.splitlines(keepends=True), source.name, file, n=3
    )
    return "".join(lines)


def generate(config: PatchConfig, source: Source | None = None, without: Collection[str] = ()) -> Generated:
    """The modeling file of ``config``. Upstream's code is read, not run.

    Args:
        config: the patches.
        source: upstream's file; the installed one without it.
        without: targets whose patches are left out.

    Raises:
        PatchError: a patch doesn't fit upstream's code.
    """
    source = source or read_source(config.source_module)
    patches = tuple(patch for patch in config.all_patches() if patch.target not in without)
    module = ModuleText(source)
    module.drop_imports(config.dropped_imports)
    module.exclude(dict.fromkeys(config.excluded))
    supplies = Supplies(module, patches)
    supplies.add_imports(config)
    for block in config.post_import_blocks:
        module.blocks += cst.parse_module(block.strip() + "\n").body
    for helper in config.helpers:
        supplies.add_helper(helper)
    errors = []
    for patch in patches:
        try:
            _apply(patch, module, supplies)
        except PatchError as error:  # all of them at once
            errors.append(str(error))
        supplies.notes += _not_reached(patch, source)
    if errors:
        raise PatchError("\n".join(errors))
    if not source.tree.body:
        raise PatchError(f"{source.name} is empty")
    module.leave_out_unused()
    supplies.build_own_classes()
    module.filter_lists(config.excluded)
    supplies.check_own_imports(config)
    module.check_references([*config.excluded, *module.left_out])
    body = with_head(module.finished(), config, source, patches)
    text, is_formatted = formatted(source.tree.with_changes(body=body, header=[]).code)
    ast.parse(text)
    left = [f"left out, since nothing uses it any more: {name}" for name in module.left_out]
    return Generated(config, source, text, (*left, *supplies.notes), is_formatted)


def _apply(patch: Patch, module: ModuleText, supplies: Supplies) -> None:
    owner, _, method = patch.target.partition(".")
    kinds: dict[str, tuple[Any, str]] = {
        REPLACE_FUNCTION: (cst.FunctionDef, "function"),
    }
    kind, what = kinds.get(patch.kind, (cst.ClassDef, "class"))
    if isinstance(patch.replacement, External):
        kind, what = (cst.ClassDef, cst.FunctionDef), "class or function"
    try:
        module.source.definition(owner, kind, what)
    except PatchError as error:
        raise PatchError(f"{patch.title}: {error}") from None
    before: Any = module.get(owner)
    if isinstance(patch.replacement, External):
        after = _external(patch, module, supplies)
    else:
        code, rename = _code(patch, supplies)
        upstream = before
        if method:
            _refuse_several(patch.title, before, method, module.source)
            owned = inherited_method(owner, method, module.source) if patch.kind == OVERRIDE else None
            upstream = method_of(owned[1], method) if owned else None
        if patch.kind == OVERRIDE:
            check_method(owner, method, patch.new, module.source)
            after = with_method(before, with_marker(overriding(before, method, code), _marker(patch)))
        elif patch.kind == MODIFY:
            after = wrapped(before, method, with_marker(code, _marker(patch)), module.source)
        else:
            after = with_marker(code.with_changes(name=cst.Name(patch.target)), _marker(patch))
        check_fields(patch.title, code, upstream, module.source, bool(patch.declares))
        supplies.bring(PatchFile.of(patch.replacement), _raw(patch), rename, patch.title)
    if ast.dump(ast.parse(source_of(before))) == ast.dump(ast.parse(source_of(after))):
        raise PatchError(f"{patch.title} changes nothing: upstream's code is the same. Remove the patch")
    module.replace(owner, after)


def _refuse_several(title: str, owner: cst.ClassDef, method: str, source: Source) -> None:
    """Raise PatchError if a class's body defines ``method`` twice. A property's parts and overloads don't count."""
    own = [each for each in owner.body.body if isinstance(each, cst.FunctionDef) and each.name.value == method]
    parts = ("setter", "getter", "deleter", "overload")
    whole = [each for each in own if not any(source_of(one.decorator).endswith(parts) for one in each.decorators)]
    if len(whole) > 1:
        raise PatchError(f"{title}: {source.name} defines it {len(whole)} times; replace the class")


def _not_reached(patch: Patch, source: Source) -> list[str]:
    """The classes that have a patched method of their own, and so not the patch of their parent's."""
    owner, _, method = patch.target.partition(".")
    return [
        f"{patch.title} does not reach {name}, which has a {method} of its own"
        for name, node in source.statements.items()
        if method not in ("", "__init__")
        and name != owner
        and isinstance(node, cst.ClassDef)
        and method_of(node, method)
        if any(ancestor.name.value == owner for _, ancestor in lineage(name, source))
    ]


def _raw(patch: Patch) -> Any:
    code = PatchFile.of(patch.replacement).code_of(patch.replacement)
    wanted = cst.ClassDef if patch.kind == REPLACE_CLASS else cst.FunctionDef
    if not isinstance(code, wanted):
        raise PatchError(f"{patch.title}: {code.name.value} is no {'class' if wanted is cst.ClassDef else 'function'}")
    return code


def _code(patch: Patch, supplies: Supplies) -> tuple[Any, Callable[[str], str]]:
    """The patch's code under the names of the generated file, and what gave it those names."""
    raw, file = _raw(patch), PatchFile.of(patch.replacement)
    own = raw.name.value
    mapped = new_prefix(patch.name_map)
    if patch.name_map:
        siblings = supplies.siblings(file)
        check_sibling_fields(patch.title, raw, mapped, siblings, supplies.module.source)

    def rename(name: str) -> str:
        if name == own and patch.kind in (REPLACE_CLASS, REPLACE_FUNCTION):
            return patch.target
        return supplies.name_in_module(file, name, mapped)

    return renamed(raw, rename), rename


def _external(patch: Patch, module: ModuleText, supplies: Supplies) -> Any:
    external: External = patch.replacement
    there = read_source(external.module)
    if external.name not in there.statements and external.name not in there.imports:
        known = [*there.statements, *there.imports]
        raise PatchError(f"{patch.title}: {there.name} has no {external.name}. {did_you_mean(external.name, known)}")
    if external.name == patch.target:
        raise PatchError(f"{patch.title}: {external.module} gives it the same name; write a class that inherits it")
    supplies.import_name(external.name, (external.module, external.name), patch.title)
    return with_marker(parse_statement(f"{patch.target} = {external.name}"), _marker(patch))


def _marker(patch: Patch) -> list[str]:
    lines = [f"patchgen: {patch.title}" + (f": {' '.join(patch.description.split())}" if patch.description else "")]
    return lines + ([f"patchgen: declares: {' '.join(patch.declares.split())}"] if patch.declares else [])
