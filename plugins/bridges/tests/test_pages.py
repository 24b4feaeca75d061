"""The pages of the bridges and of the Python API: each is one program, and its tables are the code's."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import veomni_core

pytestmark = pytest.mark.docs

DOCS = Path(__file__).resolve().parents[3] / "docs"
API = DOCS / "reference" / "python.md"
PAGES = (API, DOCS / "how-to" / "transformers-trainer.md", DOCS / "how-to" / "trl.md")


def blocks(page: Path, language: str) -> list[str]:
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert {written for written, _ in fences} <= {"python", "text"}  # nothing stands there that is not run or compared
    return [block for written, block in fences if written == language]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_page_is_a_program(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "page"}
    for block in blocks(page, "python"):
        exec(compile(block, page.name, "exec"), names)
    printed = capsys.readouterr().out
    assert "<Binding of LlamaForCausalLM on cpu (CPU): " in printed
    for shown in blocks(page, "text"):
        assert shown.strip() in printed


def test_the_page_lists_every_public_name():
    def first_sentence(name: str) -> str:
        text = " ".join((inspect.getdoc(getattr(veomni_core, name)) or "").split("\n\n")[0].split())
        return re.sub(r":\w+:`~?([\w.]+)`", r"`\1`", text).replace("``", "`")

    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", API.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == [(name, first_sentence(name)) for name in veomni_core.__all__]
