"""A copy of the committed tree, in which faults are planted; Python then imports the copy, also in subprocesses."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from faults.listed import ROOT, Fault

_PLUGIN = Path(__file__).resolve().parent / "pytest_plugin"
# Prints where each package is imported from, as an entry point names it, in a process of a process.
_CHILD = """
import importlib, json
from importlib.metadata import entry_points
modules = {each.module for each in entry_points(group="veomni.plugins")} | {"veomni_core", "veomni_core.cli"}
print(json.dumps({name: importlib.import_module(name).__file__ for name in sorted(modules)}))
"""
_PARENT = f"import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', {_CHILD!r}]).returncode)"


class CopiedTree:
    """The copy.

    Args:
        folder: an empty folder for it.

    Attributes:
        commit: what was copied.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # A clone, since some tests ask git which files there are. It shares objects, and changes nothing here.
        subprocess.run(["git", "clone", "--quiet", "--shared", str(ROOT), str(folder)], check=True)
        command = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
        self.commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        self._written = itertools.count(int(folder.stat().st_mtime) + 10)

    @property
    def sources(self) -> list[Path]:
        """The folders that hold the packages."""
        return [self.folder / "core/src", *sorted(self.folder.glob("plugins/*/src"))]

    def environment(self, **variables: str) -> Mapping[str, str]:
        """The environment of a process that imports the copy. Editable installs come after ``PYTHONPATH``."""
        path = [*map(str, self.sources), str(_PLUGIN), *filter(None, [os.environ.get("PYTHONPATH")])]
        threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        return {**os.environ, **threads, **variables, "PYTHONPATH": os.pathsep.join(path)}

    def check_imports(self) -> None:
        """Raise AssertionError unless a process, and one that it starts, import every package from the copy."""
        for code in (_CHILD, _PARENT):
            command = [sys.executable, "-c", code]
            done = subprocess.run(command, cwd=self.folder, env=self.environment(), capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            found = json.loads(done.stdout)
            elsewhere = {name: file for name, file in found.items() if self.folder not in Path(file).parents}
            assert len(found) > 10 and not elsewhere, f"imported from elsewhere: {elsewhere}"

    @contextmanager
    def with_fault(self, fault: Fault) -> Iterator[None]:
        """Plant ``fault`` in this context."""
        path = self.folder / fault.file
        text = path.read_text(encoding="utf-8")
        self._write(path, fault.planted_in(text))
        try:
            yield
        finally:
            self._write(path, text)

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text, encoding="utf-8")
        second = next(self._written)  # bytecode is told apart by the second in which its source was written
        os.utime(path, (second, second))


@contextmanager
def copied_tree() -> Iterator[CopiedTree]:
    """A copy in a temporary folder, from which everything is imported."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        tree = CopiedTree(Path(folder) / "tree")
        tree.check_imports()
        yield tree
