"""docs/start.md as a newcomer follows it: wheels, ten lines of Python, a job and its report, with the page's commands.

The environment has nothing but the wheels that the page installs and what they require.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from documented_code import ROOT, Block, blocks, commands, plugins
from fresh_environment import FAMILY, FreshEnvironment, build_wheel
from page_run import check_output

pytestmark = pytest.mark.docs
PAGE = ROOT / "docs" / "start.md"
_KERNELS = "plugins/torch_native"
SOURCES = {"veomni-kernels": "plugins/kernels", "veomni-trainer": "plugins/trainer"}


class Newcomer:
    """Follows the page in ``folder``; the environment is made by the page's first ``pip install``."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._environment = folder, FreshEnvironment(folder / "environment")
        self._printed = ""

    def follow(self, block: Block) -> None:
        if block.language == "console":
            for command, expected in commands(block):
                program, *words = shlex.split(command)
                self._printed = self._install(words[1:]) if program == "pip" else self._veomni(words)
                if expected:
                    check_output(expected, self._printed)
        elif block.language == "python":
            self._printed = self._python("-c", block.text)
        elif block.language == "text":
            check_output("..." + block.text, self._printed)
        else:
            (self._folder / block.file).write_text(block.text, encoding="utf-8")

    def _install(self, names: list[str]) -> str:
        wheels = [
            build_wheel(ROOT / source, self._folder) for source in (*FAMILY, _KERNELS, *map(SOURCES.__getitem__, names))
        ]
        self._environment.link_requirements(wheels)
        self._environment.install(*wheels)
        return ""

    def _veomni(self, words: list[str]) -> str:
        return self._python("-m", "veomni_core.cli", *words)

    def _python(self, *arguments: str) -> str:
        on_a_cpu = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        return self._environment.run(*arguments, environment=on_a_cpu)


def test_from_wheels_to_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    newcomer = Newcomer(tmp_path)
    followed = [block for block in blocks(PAGE) if block.mark == f"run by tests/{Path(__file__).name}"]
    for block in followed:
        newcomer.follow(block)
    assert [block.language for block in followed] == ["console", "console", "python", "text", "yaml", "console"]
    assert plugins(PAGE).split(",") == ["veomni-torch", "veomni-trainer"]
    report = (tmp_path / "runs" / "first" / "report.html").read_text(encoding="utf-8")
    assert "all eager" in report and "rms_norm_implementation" in report
