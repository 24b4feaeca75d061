"""Builds the project's distributions by hatchling, all in one process: faster than one process for each."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = [ROOT / "core", *sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))]
_BUILD = """
import os, sys
from hatchling.build import build_sdist, build_wheel
folder, *sources = sys.argv[1:]
for source in sources:
    os.chdir(source)
    build_wheel(folder), build_sdist(folder)
"""


def build(sources: Iterable[Path], folder: Path) -> list[Path]:
    """The wheels and sdists of ``sources``, in ``folder``.

    Raises:
        RuntimeError: one can't be built; the message has the output.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Without the date that a machine may set: what is built is the same everywhere.
    environment = {name: value for name, value in os.environ.items() if name != "SOURCE_DATE_EPOCH"}
    command = [sys.executable, "-c", _BUILD, str(folder), *map(str, sources)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command[3:])} can't be built:\n{result.stdout}\n{result.stderr}")
    return sorted([*folder.glob("*.whl"), *folder.glob("*.tar.gz")])


def copied(folder: Path) -> list[Path]:
    """The sources of all distributions in ``folder``, as someone else might have them: other dates and permissions."""
    shared = [ROOT / "conftest.py", ROOT / ".gitignore", *ROOT.glob("scripts/*.*"), *ROOT.glob("tests/*.py")]
    shared += [path for path in ROOT.glob("tests/npu_sim/**/*") if path.is_file() and "__pycache__" not in path.parts]
    for source in SOURCES:
        shutil.copytree(source, folder / source.relative_to(ROOT), ignore=shutil.ignore_patterns("__pycache__"))
    for file in shared:
        (folder / file.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, folder / file.relative_to(ROOT))
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o600)
            os.utime(path, (1_000_000_000, 1_000_000_000))
    return [folder / source.relative_to(ROOT) for source in SOURCES]
