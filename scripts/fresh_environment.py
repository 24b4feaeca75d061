"""A new virtual environment that holds chosen third-party distributions and what pip installs into it, and no more.

Third-party distributions are linked from the running environment instead of being fetched again: what a distribution
requires is followed through its metadata, so one that nobody asked for is not there, and an import that a package
forgot to declare fails as it would for its users.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import Distribution, PathDistribution, distribution
from pathlib import Path
from zipfile import Path as ZipPath

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
FAMILY = ("core", "plugins/ops", "plugins/transformers", "plugins/conformance", "plugins/tools")


class FreshEnvironment:
    """A virtual environment in ``folder``, empty at first."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=False, symlinks=True)
        self.python = folder / "bin" / "python"
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        self._site_packages = folder / "lib" / version / "site-packages"

    def copy(self, folder: Path) -> FreshEnvironment:
        """Another environment in ``folder`` with all that this one has: pip compiles a wheel only once so."""
        other = FreshEnvironment(folder)
        shutil.copytree(self._site_packages, other._site_packages, symlinks=True, dirs_exist_ok=True)
        return other

    def link_requirements(self, wheels: Iterable[Path], also: Iterable[str] = ()) -> None:
        """Provide all that ``wheels`` and the requirements ``also`` need, directly or not, apart from the wheels."""
        described = [_metadata_of_wheel(wheel) for wheel in wheels]
        own = {canonicalize_name(metadata.name) for metadata in described}
        seen: set[tuple[str, str]] = set()
        waiting = [requirement for metadata in described for requirement in _requirements(metadata)]
        waiting += map(Requirement, also)
        while waiting:
            requirement = waiting.pop()
            name = canonicalize_name(requirement.name)
            for extra in {"", *requirement.extras}:
                if name in own or (name, extra) in seen:
                    continue
                seen.add((name, extra))
                installed = distribution(name)
                self._link(installed)
                waiting += _requirements(installed, extra)

    def install(self, *wheels: Path) -> None:
        """``pip install`` the wheels, with no index: what they require must be here already."""
        self._pip("install", "--quiet", "--no-index", *map(str, wheels))

    def uninstall(self, *distributions: str) -> None:
        """``pip uninstall`` them."""
        self._pip("uninstall", "--quiet", "--yes", *distributions)

    def run(self, *arguments: str, environment: Mapping[str, str] | None = None, check: bool = True) -> str:
        """Run this environment's Python with ``arguments``; gives what it printed, and raises if it fails."""
        return self._run([str(self.python), *arguments], environment, check)

    @contextmanager
    def forks(self, *modules: str) -> Iterator[Callable[..., str]]:
        """As :meth:`run`, for ``-c`` and ``-m``, in forks of one process of this environment.

        It has imported ``modules``, so that programs whose question is another one need not each take seconds for that.
        """
        server = [str(self.python), str(Path(__file__).with_name("fork_server.py")), *modules]
        clean = {**_clean_environment(), "OMP_NUM_THREADS": "1"}
        with (
            tempfile.TemporaryDirectory() as folder,
            subprocess.Popen(server, env=clean, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process,
        ):
            assert process.stdin and process.stdout

            def run(*arguments: str, environment: Mapping[str, str] | None = None, check: bool = True) -> str:
                assert process.stdin and process.stdout
                files = {name: Path(tempfile.mkstemp(dir=folder)[1]) for name in ("output", "errors")}
                asked = {name: str(file) for name, file in files.items()}
                line = json.dumps({**asked, "arguments": arguments, "environment": {**(environment or {})}})
                process.stdin.write(f"{line}\n")
                process.stdin.flush()
                code = process.stdout.readline().strip()
                printed = "".join(file.read_text(encoding="utf-8") for file in files.values())
                if not code or (check and code != "0"):
                    raise RuntimeError(f"{' '.join(arguments)}\nended with {code or 'its server'}\n{printed}")
                return printed

            yield run
            process.stdin.close()

    def _pip(self, *arguments: str) -> None:
        pip = [sys.executable, "-m", "pip", "--python", str(self.python), "--disable-pip-version-check"]
        self._run([*pip, *arguments])

    def _run(self, command: list[str], environment: Mapping[str, str] | None = None, check: bool = True) -> str:
        variables = {**_clean_environment(), **(environment or {})}
        result = subprocess.run(command, capture_output=True, text=True, env=variables)
        if check and result.returncode:
            raise RuntimeError(f"{' '.join(command)}\nended with {result.returncode}\n{result.stdout}\n{result.stderr}")
        return result.stdout + result.stderr

    def _link(self, installed: Distribution) -> None:
        for top in {path.parts[0] for path in installed.files or () if path.parts[0] not in ("..", "__pycache__")}:
            link = self._site_packages / top
            if not link.exists():
                link.symlink_to(Path(str(installed.locate_file(top))).resolve())


def _clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VEOMNI_"))}


def build_wheel(source: Path, folder: Path) -> Path:
    """Build the distribution in ``source`` with the backend that is installed here; gives the wheel in ``folder``."""
    before = set(folder.glob("*.whl"))
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(source)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{source} builds no wheel:\n{result.stdout}\n{result.stderr}")
    (wheel,) = set(folder.glob("*.whl")) - before
    return wheel


def build_family(folder: Path) -> list[Path]:
    """The wheels that a plugin author needs: the core, and the distributions that define and check ops."""
    return [build_wheel(ROOT / source, folder) for source in FAMILY]


def with_own_requirements(wheel: Path, wheels: Iterable[Path]) -> list[Path]:
    """``wheel``, and those of ``wheels`` that it requires, directly or not."""
    by_name = {canonicalize_name(_metadata_of_wheel(each).name): each for each in wheels}
    found, waiting = [], [wheel]
    while waiting:
        found.append(each := waiting.pop())
        names = {canonicalize_name(requirement.name) for requirement in _requirements(_metadata_of_wheel(each))}
        waiting += [by_name[name] for name in sorted(names & by_name.keys()) if by_name[name] not in (*found, *waiting)]
    return found


def _metadata_of_wheel(wheel: Path) -> Distribution:
    (info,) = (entry for entry in ZipPath(wheel).iterdir() if entry.name.endswith(".dist-info"))
    return PathDistribution(info)  # type: ignore[arg-type]


def _requirements(described: Distribution, extra: str = "") -> list[Requirement]:
    requirements = [Requirement(text) for text in described.requires or ()]
    return [r for r in requirements if r.marker is None or r.marker.evaluate({"extra": extra})]
