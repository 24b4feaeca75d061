"""The files that a distribution's code consists of, and their hashes. Imports none of them.

They are the files that an import would find, so a folder that hides an installed package is seen. Left out are bytecode
and tools' caches, what an installer writes (``*.dist-info``, scripts), and of editable installs what leads to the
sources.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from collections.abc import Iterable, Iterator
from importlib.machinery import ModuleSpec, all_suffixes
from importlib.metadata import Distribution
from pathlib import Path, PurePosixPath

from veomni_core.discovery.registry import PluginRecord
from veomni_core.errors import HostError

_CACHES = {"__pycache__", ".ipynb_checkpoints", ".mypy_cache", ".pytest_cache", ".ruff_cache"}
_SCRIPTS = {"bin", "Scripts"}
_LIBRARIES = {"torch", "triton"}  # too large to be hashed; their versions are recorded


def hashed_files(distribution: Distribution, modules: Iterable[str] = ()) -> dict[str, str]:
    """The SHA-256 of each file of ``distribution``, by its path as an import names it (``acme_norm/plugin.py``).

    A file that RECORD lists and that is gone is left out. A file that lies in one of the packages is there, whether
    RECORD lists it or not.

    Args:
        distribution: what is installed.
        modules: modules that belong to it for sure: those of its entry points. An editable install, and one without
            RECORD, may say of no others.

    Raises:
        HostError: a file can't be read.
    """
    names, data = _editable_contents(distribution) if _is_editable(distribution) else _contents(distribution)
    for root in map(_root_of, modules):
        if not any(root == name or root.startswith(f"{name}.") for name in names):
            names.add(root)
    found = {path: Path(str(distribution.locate_file(path))) for path in data}
    for name in names:
        found |= _files_of_module(name)
    return {path: _sha256(file) for path, file in sorted(found.items()) if file.is_file()}


def modules_of(plugin: PluginRecord) -> Iterator[str]:
    """The modules with the plugin's code: its entry point's, and those that its kernels name, of whichever package."""
    yield plugin.module
    for reference in (str(each) for spec in plugin.kernels for each in (spec.factory, spec.can_run)):
        if reference and reference.partition(".")[0] not in _LIBRARIES:
            yield reference


def hashes_elsewhere(plugin: PluginRecord) -> dict[str, str]:
    """One SHA-256 for each package or module, by its name, that :func:`modules_of` has beside the entry point's own."""
    roots = {_root_of(module) for module in modules_of(plugin)} - {_root_of(plugin.module)}
    return {root: combined({path: _sha256(file) for path, file in _files_of_module(root).items()}) for root in roots}


def combined(hashes: dict[str, str]) -> str:
    """One SHA-256 for all of ``hashes``, with their names."""
    return hashlib.sha256("".join(f"{name}\n{each}\n" for name, each in sorted(hashes.items())).encode()).hexdigest()


def _is_editable(distribution: Distribution) -> bool:
    try:
        origin = json.loads(distribution.read_text("direct_url.json") or "{}")
        return bool(origin.get("dir_info", {}).get("editable"))
    except (ValueError, AttributeError):  # damaged, so it says nothing
        return False


def _contents(distribution: Distribution) -> tuple[set[str], set[str]]:
    """The packages and modules of an installed wheel, and the paths of its other files, as RECORD has them."""
    content = {path for path in _recorded(distribution) if _is_content(path)}
    packages = set(_topmost_packages(content))
    loose = {path for path in content if not packages & {*path.parents}}
    modules = {path: _module_name(path.name) for path in loose if len(path.parts) == 1}
    names = {".".join(package.parts) for package in packages} | {*filter(None, modules.values())}
    return names, {str(path) for path in loose if not modules.get(path)}


def _editable_contents(distribution: Distribution) -> tuple[set[str], set[str]]:
    """The same of an editable install: what lies at the top of the folders that its ``.pth`` files add to the path."""
    names = set()
    for path in _recorded(distribution):
        file = Path(str(distribution.locate_file(path)))
        if path.suffix == ".pth" and file.is_file():
            lines = map(Path, file.read_text("utf-8", "replace").splitlines())
            names |= {name for line in lines if line.is_absolute() and line.is_dir() for name in _importable(line)}
    return names, set()


def _recorded(distribution: Distribution) -> list[PurePosixPath]:
    """The paths that RECORD lists."""
    try:
        return [PurePosixPath(path) for path in distribution.files or () if path.parts]
    except Exception as error:  # no UTF-8, or lines of another form
        raise HostError(
            f"{distribution.name}: the list of its files (RECORD) can't be read ({type(error).__name__}: {error}). "
            "Install it again"
        ) from error


def _importable(folder: Path) -> Iterator[str]:
    """The names of the packages and modules at the top of ``folder``."""
    for path in folder.iterdir():
        if (path / "__init__.py").is_file():
            yield path.name
        elif path.is_file() and (name := _module_name(path.name)):
            yield name


def _topmost_packages(content: Iterable[PurePosixPath]) -> Iterator[PurePosixPath]:
    """The folders with an ``__init__.py`` that lie in no other such folder; namespace packages have none."""
    packages = {path.parent for path in content if path.name == "__init__.py"}
    yield from (package for package in packages if not packages & {*package.parents})


def _is_content(path: PurePosixPath) -> bool:
    """Whether a path of RECORD is the author's, and not the installer's; a path that leaves the folder may be data."""
    folders = {*path.parts[:-1]}
    outside = path.parts[0] == ".."
    return not (
        folders & _CACHES or (outside and folders & _SCRIPTS) or any(each.endswith(".dist-info") for each in folders)
    )


def _module_name(file: str) -> str:
    """The module that the file of this name is; empty if it is none."""
    return next((file.removesuffix(each) for each in all_suffixes() if file.endswith(each)), "")


def _root_of(module: str) -> str:
    """The package or module that is imported first for ``module``, past namespace packages, which run no code."""
    name = ""
    for part in module.partition(":")[0].split("."):
        name = f"{name}.{part}" if name else part
        spec = _spec_of(name)
        if spec is None or spec.origin is not None:
            break
    return name


def _spec_of(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):  # a parent is missing, or somebody's module has no spec
        return None


def _files_of_module(name: str) -> dict[str, Path]:
    """The files of the package or module ``name`` where an import finds it; empty if it finds none."""
    spec, inside = _spec_of(name), PurePosixPath(*name.split("."))
    if spec is None or spec.origin is None:
        return {}
    if not spec.submodule_search_locations:
        origin = Path(spec.origin)
        return {str(inside.with_name(origin.name)): origin}
    found: dict[str, Path] = {}
    for folder in map(Path, spec.submodule_search_locations):
        for parent, folders, files in os.walk(folder, followlinks=True):
            folders[:] = [each for each in folders if each not in _CACHES and not _leads_back(Path(parent, each))]
            below = inside / Path(parent).relative_to(folder).as_posix()
            found |= {str(below / file): Path(parent) / file for file in files}
    return found


def _leads_back(folder: Path) -> bool:
    """Whether ``folder`` is a link to one that it lies in."""
    return folder.is_symlink() and folder.resolve() in folder.parent.resolve().joinpath(folder.name).parents


def _sha256(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise HostError(f"{file} is installed, but can't be read ({error}), so its hash is unknown") from error
