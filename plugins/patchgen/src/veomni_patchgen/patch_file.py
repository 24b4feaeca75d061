"""The module in which patches are written: the code of each, and what it uses of its module."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider

from veomni_core.errors import ConfigError, did_you_mean
from veomni_patchgen.config import PatchConfig
from veomni_patchgen.errors import PatchError
from veomni_patchgen.source import Source, read_code, read_source

_NOT_THERE = re.compile(r"cannot import name '(\w+)' from '([\w.]+)'")


def load_patches(name: str) -> ModuleType:
    """The patches' module: a dotted name, or a path to a Python file. It is imported, unlike what it patches.

    Raises:
        ConfigError: there is no such module.
        PatchError: it imports what is not there, such as a name that upstream no longer has.
    """
    try:
        return _imported(name)
    except SyntaxError as error:
        raise PatchError(f"{name} can't be imported: {error}") from error
    except ImportError as error:
        match = _NOT_THERE.match(str(error))
        nearest = did_you_mean(match[1], read_source(match[2]).statements) if match else "Install it, or leave it out"
        raise PatchError(f"{name} can't be imported: {error}. {nearest}") from error


def _imported(name: str) -> ModuleType:
    path = Path(name)
    if path.suffix != ".py":
        sys.path.insert(0, "")
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name and name.startswith(error.name):
                raise ConfigError(f"there is no module {name}; name a module, or a file ending in .py") from None
            raise
        finally:
            sys.path.remove("")
    if not path.is_file():
        raise ConfigError(f"{name}: there is no such file of patches")
    qualified = f"{path.stem} in {path.resolve().parent}"  # no name that an import could have
    spec = importlib.util.spec_from_file_location(qualified, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[qualified] = module
    sys.path.insert(0, str(path.parent.resolve()))  # for the sibling that it takes patches from
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent.resolve()))
    return module


def configs_in(module: ModuleType) -> dict[str, PatchConfig]:
    """The configs that ``module`` makes itself, by name; not those that it imports."""
    imported = PatchFile.of(module).source.imports
    return {n: value for n, value in vars(module).items() if isinstance(value, PatchConfig) and n not in imported}


class PatchFile:
    """The source of a module in which patches are."""

    def __init__(self, module: ModuleType, path: Path) -> None:
        self.module = module
        self.source = Source(module.__name__, read_code(path))
        if package := getattr(module, "__package__", ""):
            self.source = Source(f"{package}.{module.__name__.rpartition('.')[2]}", self.source.text)

    @staticmethod
    def of(thing: Any) -> PatchFile:
        """The file of a function, a class or a module.

        Raises:
            PatchError: its source is in no file.
        """
        module = thing if isinstance(thing, ModuleType) else sys.modules.get(getattr(thing, "__module__", ""))
        if module is None or not getattr(module, "__file__", None):
            raise PatchError(f"{thing!r} can't be read: its module is no file. Write patches into a Python file")
        return _file(module, Path(str(module.__file__)))

    def code_of(self, thing: Any) -> Any:
        """The definition of a function or class, with the configs' decorators taken off.

        Raises:
            PatchError: it isn't defined at the top level of its module.
        """
        name = thing.__qualname__ if hasattr(thing, "__qualname__") else repr(thing)
        if not (inspect.isfunction(thing) or inspect.isclass(thing)) or "." in name or name == "<lambda>":
            raise PatchError(f"{name} can't be taken over: a patch is a function or a class at the top of its module")
        kind: Any = cst.ClassDef if inspect.isclass(thing) else cst.FunctionDef
        found = [(each, line) for each, line in self._lines if isinstance(each, kind) and each.name.value == name]
        if inspect.isfunction(thing):
            found = [each for each in found if each[1] == thing.__code__.co_firstlineno]
        if len(found) != 1:
            raise PatchError(f"{self.source.name} has {len(found)} definitions of {name}; it must have one")
        node: Any = found[0][0]
        return node.with_changes(decorators=[each for each in node.decorators if not self._declares(each)])

    def _declares(self, decorator: cst.Decorator) -> bool:
        node: Any = decorator.decorator
        while not isinstance(node, cst.Name):
            node = node.func if isinstance(node, cst.Call) else getattr(node, "value", None)
            if node is None:
                return False
        return isinstance(vars(self.module).get(node.value), PatchConfig)

    @functools.cached_property
    def _lines(self) -> list[tuple[Any, int]]:
        wrapper = MetadataWrapper(self.source.tree, unsafe_skip_copy=True)
        positions = wrapper.resolve(PositionProvider)

        def first(node: Any) -> int:
            marks = [*getattr(node, "decorators", ()), node]
            return min(positions[each].start.line for each in marks if each in positions)  # type: ignore[attr-defined]

        return [(node, first(node)) for node in wrapper.module.body]


@functools.lru_cache(maxsize=64)
def _file(module: ModuleType, path: Path) -> PatchFile:
    return PatchFile(module, path)
