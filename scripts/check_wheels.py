"""Builds every distribution's wheel, and installs each alone beside the core into an environment of its own.

There every module is imported, `veomni list` must call the plugin healthy, and the wheel must hold its ``py.typed``
and none of its tests. Exits with 1 and every shortcoming otherwise.
"""

from __future__ import annotations

import json
import sys
import tempfile
from configparser import ConfigParser
from pathlib import Path
from zipfile import ZipFile

from fresh_environment import FreshEnvironment, build_wheel

ROOT = Path(__file__).resolve().parent.parent
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
    return len(declared["veomni.plugins"]) if "veomni.plugins" in declared else 0


def contents_problems(wheel: Path) -> list[str]:
    """What is missing from ``wheel``, or should not be in it."""
    names = ZipFile(wheel).namelist()
    # What `veomni new-plugin` writes has tests, which are templates here.
    packed = [name for name in names if not name.endswith(".template")]
    problems = [f"{name} is in the wheel" for name in packed if "tests" in name.split("/")]
    return problems + [f"{top}/py.typed is missing" for top in packages(wheel) if f"{top}/py.typed" not in names]


def installation_problems(core: Path, plugin: Path | None, folder: Path) -> list[str]:
    """What fails when ``plugin`` (or the core alone) is installed where nothing else is."""
    environment = FreshEnvironment(folder)
    wheels = [core] if plugin is None else [core, plugin]
    try:
        environment.link_requirements(wheels)
        environment.install(*wheels)
        for package in packages(wheels[-1]):
            environment.run("-c", IMPORT_EVERYTHING, package, *GPU_LIBRARIES, *TESTING)
        listed = json.loads(environment.run("-m", "veomni_core.cli", "list", "--json"))["plugins"]
    except RuntimeError as error:
        return [str(error)]
    expected = 0 if plugin is None else number_of_plugins(plugin)
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
            problems += installation_problems(core, None if wheel == core else wheel, folder / name)
            failed |= bool(problems)
            print(f"{wheel.name}: {'; '.join(problems) or 'installs and imports alone'}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
