"""The READMEs that ``veomni new-plugin`` writes, followed where nothing but their requirements is installed."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from fresh_environment import FAMILY, FreshEnvironment, build_wheel

pytestmark = pytest.mark.docs

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("build", "editables", "hatchling", "mypy", "pytest")
MODULES = {"veomni": ("-m", "veomni_core.cli"), "python": ()}  # others are modules of their own name
GPU = torch.cuda.is_available()
NO_DEVICE = "nothing was verified: every kernel was skipped"


@dataclass(frozen=True)
class Kind:
    """What is written by ``new-plugin acme`` with ``options``, and what its README's commands then say."""

    options: str
    passed: int
    skipped: int = 0
    missing: str = ""  # what `veomni verify` misses here; the kernel then has run in the tests alone


KINDS = {
    "kernel": Kind("", passed=4),
    "new op": Kind("--new-op relu_squared", passed=6),
    "device": Kind("--device hpu", passed=6, missing="needs device type hpu"),
    "triton": Kind(
        "--triton",
        passed=4 if GPU else 5,
        skipped=int(GPU),
        missing="" if GPU else "needs device type cuda, this is cpu (CPU)",
    ),
}


@pytest.fixture(scope="module")
def family(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("family")
    return [build_wheel(ROOT / source, folder) for source in FAMILY]


@pytest.fixture(scope="module")
def core_alone(family, tmp_path_factory) -> FreshEnvironment:
    environment = FreshEnvironment(tmp_path_factory.mktemp("core_alone"))
    environment.link_requirements(family, TOOLS)
    environment.install(*family)
    return environment


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_its_commands_work(kind, family, core_alone, tmp_path, monkeypatch):
    environment = core_alone.copy(tmp_path / "environment")
    monkeypatch.chdir(tmp_path)
    environment.run("-m", "veomni_core.cli", "new-plugin", "acme", *shlex.split(kind.options))

    folder = tmp_path / "veomni-acme"
    install, *commands = re.findall(r"^\$ (.+)$", (folder / "README.md").read_text(), re.MULTILINE)
    assert install == 'pip install -e ".[dev]"'
    wheel = build_wheel(folder, tmp_path)
    environment.link_requirements([*family, wheel])  # an index is not asked
    environment.install(wheel)
    monkeypatch.chdir(folder)
    said = {command: _run(environment, command, kind) for command in commands}

    assert "acme" in said["veomni list"]
    verified = " ".join(said["veomni verify acme"].split())
    assert verified.count("│ ok ") == (0 if kind.missing else 3)
    assert kind.missing in verified
    assert (NO_DEVICE in verified) == bool(kind.missing)
    assert f"{kind.passed} passed" in said["pytest"]
    assert (f"{kind.skipped} skipped" in said["pytest"]) == bool(kind.skipped)
    assert "no issues found" in said["mypy --strict"]
    assert (folder / ".github" / "workflows" / "test.yml").is_file()
    assert list((folder / "dist").glob("veomni_acme-0.1.0-*.whl"))
    explained = [text for command, text in said.items() if command.startswith("veomni explain")]
    assert all("acme was never verified here, and auto takes" in " ".join(text.split()) for text in explained)
    assert len(explained) == ("--device" in kind.options)


def _run(environment: FreshEnvironment, command: str, kind: Kind) -> str:
    program, *arguments = shlex.split(command)
    if program == "python":
        arguments.append("--no-isolation")  # an index is not asked
    if program == "ruff":  # its executable is not linked into the environment
        return subprocess.check_output([sys.executable, "-m", program, *arguments], text=True)
    if program == "mypy":
        return _check_types(environment, arguments)
    fails = bool(kind.missing) and command == "veomni verify acme"
    return environment.run(*MODULES.get(program, ("-m", program)), *arguments, check=not fails)


def _check_types(environment: FreshEnvironment, arguments: list[str]) -> str:
    """Run mypy with a cache that all kinds, workers and later runs share: it reads torch once, for a minute."""
    cache = ROOT / ".mypy_cache" / "new_plugin"
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache.with_suffix(".lock")):  # the cache is a database, and who comes second finds torch in it
        return environment.run("-m", "mypy", *arguments, environment={"MYPY_CACHE_DIR": str(cache)})
