"""Builds every distribution's wheel, and installs each alone, with what it requires, into an environment of its own.

There every module is imported, `veomni list` must call the plugin healthy, and the wheel must hold its ``py.typed``
and none of its tests. Exits with 1 and every shortcoming otherwise.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable
from configparser import ConfigParser
from pathlib import Path
from zipfile import ZipFile

from fresh_environment import ROOT, FreshEnvironment, build_wheel, with_own_requirements

# No wheel depends on these, since each build of them is for one GPU or one CUDA; kernels import them when bound.
GPU_LIBRARIES = ("flash_attn", "flash_attn_interface", "quack")
TESTING = ("pytest",)  # an extra of the core's: one of its modules is for pytest's sessions alone
IMPORT_EVERYTHING = """
import importlib, pkgutil, sys
package, *absent = sys.argv[1:]
for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
    if not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if str(error.name).partition(".")[0] not in absent:
                raise
        except Exception as error:
            # A bridge's library is an extra; without it the bridge names the extra.
            if type(error).__name__ != "HostError" or f"{package.replace('_', '-')}[" not in str(error):
                raise
"""


def packages(wheel: Path) -> set[str]:
    """The import packages in ``wheel``."""
    tops = {name.split("/")[0] for name in ZipFile(wheel).namelist()}
    return {top for top in tops if not top.endswith(".dist-info")}


def number_of_plugins(wheel: Path) -> int:
    """How many plugins ``wheel`` brings; the bridges bring none."""
    files = ZipFile(wheel)
    declared = ConfigParser()
    for name in files.namelist():
        if name.endswith(".dist-info/entry_points.txt"):
            declared.read_string(files.read(name).decode())
    return sum(len(declared[group]) for group in ("veomni.plugins", "veomni.definitions") if group in declared)


def contents_problems(wheel: Path) -> list[str]:
    """What is missing from ``wheel``, or should not be in it."""
    names = ZipFile(wheel).namelist()
    # What `veomni new-plugin` writes has tests, which are templates here.
    packed = [name for name in names if not name.endswith(".template")]
    problems = [f"{name} is in the wheel" for name in packed if "tests" in name.split("/")]
    return problems + [f"{top}/py.typed is missing" for top in packages(wheel) if f"{top}/py.typed" not in names]


def installation_problems(wheel: Path, wheels: Iterable[Path], folder: Path) -> list[str]:
    """What fails when ``wheel`` is installed where nothing else is than those of ``wheels`` that it requires."""
    environment = FreshEnvironment(folder)
    needed = with_own_requirements(wheel, wheels)
    try:
        environment.link_requirements(needed)
        environment.install(*needed)
        for package in packages(wheel):
            environment.run("-c", IMPORT_EVERYTHING, package, *GPU_LIBRARIES, *TESTING)
        listed = json.loads(environment.run("-m", "veomni_core.cli", "list", "--json"))["plugins"]
    except RuntimeError as error:
        return [str(error)]
    expected = sum(map(number_of_plugins, needed))
    others = [record for record in listed if record["distribution"] != "veomni-core"]
    if len(others) != expected or any(record["status"] != "loaded" for record in others):
        return [f"expected {expected} healthy plugin(s), `veomni list` says {json.dumps(others, indent=1)}"]
    return []


def main() -> int:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        core = build_wheel(ROOT / "core", folder)
        plugins = [build_wheel(path.parent, folder) for path in sorted(ROOT.glob("plugins/*/pyproject.toml"))]
        failed = False
        for wheel in [core, *plugins]:
            name = wheel.name.split("-")[0]
            problems = contents_problems(wheel)
            problems += installation_problems(wheel, [core, *plugins], folder / name)
            failed |= bool(problems)
            print(f"{wheel.name}: {'; '.join(problems) or 'installs and imports alone'}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
