"""Completion, help and versions: what a shell and a new user ask of the command line first."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from veomni_core.cli.app import BUILTIN_VERBS, build_app

PLUGIN = """
    from veomni_core import CommandSpec, hookimpl

    VEOMNI_PLUGIN_API_VERSION = 1

    def greet(name: str, loudly: bool = False) -> None:
        print(f"hello {name}")

    @hookimpl
    def veomni_commands():
        return [CommandSpec("greet", "{module}:greet", "Greets somebody.")]
"""


def completed(line: str) -> list[str]:
    """What bash is told to complete at the end of ``line``."""
    words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
    environment = {"_VEOMNI_COMPLETE": "complete_bash", **words}
    return CliRunner().invoke(build_app(), [], env=environment, prog_name="veomni").stdout.split()


@pytest.mark.parametrize(
    "line, names",
    [
        ("veomni e", ["explain", "export"]),
        ("veomni explain swiglu", ["swiglu_mlp", "swiglu_mlp_implementation"]),
        ("veomni plan job.yaml --hardware h", ["h100", "h200"]),
        ("veomni explain rms_norm --hardware ascend-910b", ["ascend-910b"]),
        ("veomni verify veomni-t", ["veomni-torch", "veomni-trainer", "veomni-triton", "veomni-triton-moe"]),
        ("veomni verify veomni-torch --kernel flash_a", [f"flash_attention_{version}" for version in (2, 3, 4)]),
        ("veomni verify veomni-torch --op moe", ["moe_experts", "moe_implementation"]),
        ("veomni verify veomni-torch --dtype b", ["bfloat16"]),
        ("veomni verify veomni-torch --device cu", ["cuda"]),
        ("veomni plan job.yaml --par", ["--parallel"]),
    ],
)
def test_names_are_completed(line, names):
    assert completed(line) == names


@pytest.mark.parametrize("verb", ["plan", "train"])
def test_job_files_are_completed(tmp_path, monkeypatch, verb):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs").mkdir()
    for name in ("jobs/first.yaml", "jobs/second.yml", "jobs/notes.txt", "job.yaml", "joke.txt", ".hidden.yaml"):
        (tmp_path / name).touch()
    assert completed(f"veomni {verb} ") == ["job.yaml", "jobs/"]
    assert completed(f"veomni {verb} jobs/") == ["jobs/first.yaml", "jobs/second.yml"]
    assert completed(f"veomni {verb} nowhere/") == []


def test_the_command_of_a_plugin_is_completed(install):
    install("greeting-plugin", PLUGIN)
    assert completed("veomni gre") == ["greet"]
    assert completed("veomni greet x --lou") == ["--loudly"]


def test_completion_is_shown_and_loads_no_torch(monkeypatch):
    code = "from veomni_core.cli.app import build_app\nbuild_app()(prog_name='veomni')"
    environment = {**os.environ, "_VEOMNI_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "veomni "}
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")  # no shell may have started this process
    show = CliRunner().invoke(build_app(), ["--show-completion", "bash"], prog_name="veomni")
    assert "_VEOMNI_COMPLETE=complete_bash" in show.stdout, show.output
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", code], env=environment, capture_output=True, text=True
    )
    assert "explain" in done.stdout and " torch" not in done.stderr


def test_versions_of_every_distribution(install):
    install("broken-plugin", "import a_library_that_is_not_here", version="3.1")
    lines = CliRunner().invoke(build_app(), ["--version"]).stdout.splitlines()
    assert f"veomni-core {importlib.metadata.version('veomni-core')}" in lines
    assert f"veomni-torch {importlib.metadata.version('veomni-torch')}" in lines
    assert "broken-plugin 3.1" in lines and len(lines) == len({*lines})


@pytest.mark.parametrize("verb", [(), *((spec.name,) for spec in BUILTIN_VERBS), ("train",), ("export",)])
def test_h_is_help(verb):
    short, long = (CliRunner().invoke(build_app(), [*verb, option]) for option in ("-h", "--help"))
    assert (short.exit_code, short.stdout) == (0, long.stdout) and "Usage: " in short.stdout
