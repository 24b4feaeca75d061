"""Runs scripts of trainings, each in a fork of this process, which has imported their library.

Its argument is a JSON file. That names the libraries' modules to import first, their registries, the bridge, and for
each run its script and its arguments. What a run prints is in ``NAME.log``, and an error of veomni-core's that ends it
is in ``NAME.error.json``. The names that importing the bridge has changed are in ``changed.json``.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import runpy
import sys
from contextlib import redirect_stdout
from operator import attrgetter
from pathlib import Path
from typing import Any

from library_names import differences, names_of

from veomni_core.errors import VeOmniError


def run(name: str, script: str, arguments: list[str]) -> None:
    sys.argv = [script, *arguments]
    try:
        with open(f"{name}.log", "w", encoding="utf-8") as log, redirect_stdout(log):
            runpy.run_path(script, run_name="__main__")
    except VeOmniError as error:
        result = {"error": type(error).__name__, "message": str(error)}
        Path(f"{name}.error.json").write_text(json.dumps(result), encoding="utf-8")


def contents(registries: list[tuple[str, str]]) -> dict[str, Any]:
    """What each registry holds, named by its module and its path there."""
    return {name: dict(attrgetter(name)(importlib.import_module(module))) for module, name in registries}


def names_changed_by_importing(bridge: str, libraries: list[str], registries: list[tuple[str, str]]) -> None:
    before = {**dict(names_of(*libraries)), **contents(registries)}
    importlib.import_module(bridge)
    after = {**dict(names_of(*libraries)), **contents(registries)}
    Path("changed.json").write_text(json.dumps(differences(before, after)), encoding="utf-8")


def main() -> None:
    asked: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    for module in asked["modules"]:
        importlib.import_module(module)
    fork = multiprocessing.get_context("fork")
    libraries = ["accelerate", "peft", "transformers", "trl", asked["modules"][0].partition(".")[0]]
    compared = (asked["bridge"], libraries, asked["registries"])
    processes = [fork.Process(target=names_changed_by_importing, args=compared)]
    processes += [fork.Process(target=run, args=(name, *each)) for name, each in asked["runs"].items()]
    for process in processes:
        process.start()
        process.join()
        assert process.exitcode == 0


if __name__ == "__main__":
    main()
