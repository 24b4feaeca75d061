"""What docs/how-to/training-data.md shows is read: its jobs are valid, its chat is learned, its tables are complete."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
import yaml
from small_tokenizers import byte_level

from veomni_core.errors import JobFileError
from veomni_trainer.data.files import format_of
from veomni_trainer.data.read import read_documents
from veomni_trainer.data.reading import Reading
from veomni_trainer.data.tokens import PretrainedTokenizer
from veomni_trainer.job.data_section import DataSection
from veomni_trainer.job.source_keys import ReadingKeys, Source

pytestmark = pytest.mark.docs

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "how-to" / "training-data.md").read_text(encoding="utf-8")
TOKENIZER = PretrainedTokenizer(byte_level(), end=0)


def _blocks(language: str) -> list[str]:
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return [block for written, block in fences if written == language]


@pytest.mark.parametrize("block", _blocks("yaml"))
def test_its_jobs_are_valid(block: str) -> None:
    DataSection.model_validate(yaml.safe_load(block)["data"])


def test_its_chat_is_a_line_of_jsonl(tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text(_blocks("json")[0], encoding="utf-8")
    (document,) = read_documents(Source(files=str(tmp_path)), TOKENIZER, Reading())
    assert document.learned is not None and TOKENIZER.chats is not None
    assert TOKENIZER.chats.decode(document.ids[document.learned]) == "4<|im_end|>\n"


def test_its_table_of_formats_is_that_of_the_schema() -> None:
    section = PAGE.partition("## Formats")[2].partition("\n## ")[0]
    rows = [row.split(" | ") for row in re.findall(r"^\| (`.*)", section, re.MULTILINE)][1:]
    listed = {name: suffixes for names, suffixes, _ in rows for name in re.findall(r"`(\w+)`", names)}
    (formats, _) = get_args(ReadingKeys.model_fields["format"].annotation)
    assert {*listed} == {*get_args(formats)}
    for names, suffixes, _ in rows:
        for suffix in re.findall(r"`(\.\w+)`", suffixes):
            assert f"`{format_of(Path(f'a{suffix}'))}`" in names


def test_its_error_is_what_is_said(tmp_path: Path) -> None:
    good = '{"messages": [{"role": "assistant", "content": "a"}]}\n'
    chat = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}]}\n'
    path = tmp_path / "chats.jsonl"
    path.write_text(chat * 6 + chat.replace("assistant", "asistant") + good, encoding="utf-8")
    with pytest.raises(JobFileError) as caught:
        list(read_documents(Source(files=str(path)), TOKENIZER, Reading()))
    shown = next(" ".join(block.split()) for block in _blocks("") if block.startswith("data.files: "))
    assert str(caught.value).replace(str(path), "/data/chats.jsonl") == shown
