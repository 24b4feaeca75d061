"""The README that ``veomni new-plugin`` writes, followed where nothing but its requirements is installed."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fresh_environment import FreshEnvironment, build_wheel

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("build", "editables", "hatchling", "mypy", "pytest")
MODULES = {"veomni": ("-m", "veomni_core.cli"), "python": ()}  # others are modules of their own name


@pytest.mark.slow
def test_its_commands_work(tmp_path, monkeypatch):
    wheels = [build_wheel(ROOT / "core", tmp_path)]
    environment = FreshEnvironment(tmp_path / "environment")
    environment.link_requirements(wheels, TOOLS)
    environment.install(*wheels)
    monkeypatch.chdir(tmp_path)
    environment.run("-m", "veomni_core.cli", "new-plugin", "acme")

    folder = tmp_path / "veomni-acme"
    install, *commands = re.findall(r"^\$ (.+)$", (folder / "README.md").read_text(), re.MULTILINE)
    assert install == 'pip install -e ".[dev]"'
    environment.install(build_wheel(folder, tmp_path))  # an index is not asked
    monkeypatch.chdir(folder)
    said = {command: _run(environment, command) for command in commands}

    assert "acme" in said["veomni list"]
    assert said["veomni verify acme"].count("│ ok ") == 3
    assert "3 passed" in said["pytest"]
    assert "no issues found" in said["mypy --strict"]
    assert list((folder / "dist").glob("veomni_acme-0.1.0-*.whl"))


def _run(environment: FreshEnvironment, command: str) -> str:
    program, *arguments = shlex.split(command)
    if program == "python":
        arguments.append("--no-isolation")  # an index is not asked
    if program == "ruff":  # its executable is not linked into the environment
        return subprocess.check_output([sys.executable, "-m", program, *arguments], text=True)
    return environment.run(*MODULES.get(program, ("-m", program)), *arguments)
