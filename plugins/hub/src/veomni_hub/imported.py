"""Imports a build variant, under the name that its metadata gives it, without bytecode that no digest covers."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from kernels import Metadata
from kernels.validate import ArchValidator, default_metadata_validators

from veomni_core.errors import ConfigError, HostError

_imported: dict[Path, ModuleType] = {}


def imported(variant: Path) -> ModuleType:
    """The package in the folder ``variant``; the same module each time.

    Raises:
        ConfigError: its metadata can't be read, it has no ``__init__.py``, or it needs other kernels of the Hub.
        HostError: this machine lacks what the metadata asks for.
    """
    if variant not in _imported:
        metadata = _metadata(variant)
        _imported[variant] = _executed(metadata.id, variant / "__init__.py")
    return _imported[variant]


def _metadata(variant: Path) -> Metadata:
    path = variant / "metadata.json"
    try:
        metadata = Metadata.read_from_file(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not the metadata of a kernel: {error}") from error
    if metadata.kernel_depends:
        needs = ", ".join(each.repo_id for each in metadata.kernel_depends)
        raise ConfigError(f"{path}: the kernel loads other kernels of the Hub ({needs}), which no digest here covers")
    try:
        for validator in (*default_metadata_validators(), ArchValidator()):
            validator.validate_metadata(metadata=metadata, variant=variant.name)
    except (ImportError, RuntimeError, ValueError) as error:
        raise HostError(f"{path}: {error}") from error
    return metadata


def _executed(name: str, file: Path) -> ModuleType:
    if not file.is_file():
        raise ConfigError(f"{file.parent} has no __init__.py, which a build variant of a kernel must have")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    if name in sys.modules:
        raise ConfigError(f"{file.parent}: its metadata's id is {name!r}, and a module of that name is loaded already")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with _bytecode_elsewhere():
            spec.loader.exec_module(module)
    except BaseException:
        for loaded in [each for each in sys.modules if each == name or each.startswith(f"{name}.")]:
            del sys.modules[loaded]
        raise
    return module


@contextmanager
def _bytecode_elsewhere() -> Iterator[None]:
    """Python neither reads nor writes ``__pycache__`` in the package's folder: its files are not in the digest."""
    before = sys.pycache_prefix
    with tempfile.TemporaryDirectory() as folder:
        sys.pycache_prefix = folder
        try:
            yield
        finally:
            sys.pycache_prefix = before
