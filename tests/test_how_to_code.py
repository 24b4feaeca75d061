"""The blocks of how-to pages run, in order and in a folder of their own, and print what the pages say.

An HTML comment above a block says what else is true of it: ``<!-- not run: REASON -->``, ``<!-- run by TEST -->``, or
``<!-- output -->`` for what the block before it printed.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

from veomni_core.cli.app import build_app

PAGES = Path(__file__).resolve().parent.parent / "docs" / "how-to"
BLOCK = re.compile(r"(?:^<!-- ([^>]*) -->\n)?^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ALIKE = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@pytest.mark.parametrize(
    "page",
    [
        "per-module.md",
        "teacher-and-student.md",
        "debug-a-divergence.md",
        "checkpoints.md",
        "packing.md",
        "new-model-family.md",
        "new-op.md",
        "new-device.md",
    ],
)
def test_the_blocks_of_a_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": page}
    printed = ""
    for mark, language, block in BLOCK.findall((PAGES / page).read_text(encoding="utf-8")):
        if mark.startswith(("not run: ", "run by ")):
            continue
        if mark == "output":
            checker = doctest.OutputChecker()
            assert checker.check_output(block, printed, ALIKE), f"{page} says\n{block}\nand prints\n{printed}"
        elif language == "python":
            with torch.random.fork_rng(devices=[]), contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(block, page, "exec"), names)
            printed = out.getvalue()
        elif language == "yaml":
            assert {"model"} <= yaml.safe_load(block).keys()
            (tmp_path / "job.yaml").write_text(block, encoding="utf-8")
        elif language == "console":
            for line in block.splitlines():
                result = CliRunner().invoke(build_app(), line.removeprefix("$ veomni ").split())
                assert result.exit_code == 0, f"{line}: {result.output} {result.exception}"
        else:
            raise AssertionError(f"{page}: a block of {language} is not run: say why not")
