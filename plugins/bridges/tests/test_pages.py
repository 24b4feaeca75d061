"""bridges.md and python.md: what they show of transformers, TRL and Python is a program."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import veomni_core
from documented_code import blocks

pytestmark = pytest.mark.docs

DOCS = Path(__file__).resolve().parents[3] / "docs"
API = DOCS / "reference" / "python.md"
PAGES = (API, DOCS / "how-to" / "bridges.md")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_page_is_a_program(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    here = [block for block in blocks(page) if block.value("run by ") == "plugins/bridges/tests/test_pages.py"]
    assert {block.language for block in here} <= {"python", "text"}
    names = {"__name__": "page"}
    for block in here:
        if block.language == "python":
            exec(compile(block.text, page.name, "exec"), names)
    printed = capsys.readouterr().out
    assert "<Binding of LlamaForCausalLM on cpu (CPU): " in printed
    for block in here:
        if block.language == "text":
            assert block.text.strip() in printed


def test_the_page_lists_every_public_name():
    def first_sentence(name: str) -> str:
        text = " ".join((inspect.getdoc(getattr(veomni_core, name)) or "").split("\n\n")[0].split())
        return re.sub(r":\w+:`~?([\w.]+)`", r"`\1`", text).replace("``", "`")

    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", API.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == [(name, first_sentence(name)) for name in veomni_core.__all__]
