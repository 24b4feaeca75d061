"""Every decision record has a number, a title, a date and a status, and the list of them is complete."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "adr"
RECORDS = sorted(path for path in FOLDER.glob("*.md") if path.name != "README.md")
NUMBERS = [path.name[:4] for path in RECORDS]
HEAD = re.compile(
    r"# (?P<number>\d{4})\. (?P<title>\S.*)\n\nDate: (?P<date>\d{4}-\d\d-\d\d)\n\nStatus: (?P<status>.+)\n\n\S"
)
STATUS = re.compile(r"accepted|superseded by (\d{4})")


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_starts_with_number_title_date_and_status(path):
    head = HEAD.match(path.read_text(encoding="utf-8"))
    assert head, "expected '# NNNN. Title', 'Date: YYYY-MM-DD' and 'Status: accepted', each followed by an empty line"
    assert path.name.startswith(f"{head['number']}-")
    date.fromisoformat(head["date"])
    status = STATUS.fullmatch(head["status"])
    assert status, f"write 'accepted' or 'superseded by NNNN', not {head['status']!r}"
    assert status[1] is None or status[1] in NUMBERS


def test_numbers_are_counted_without_a_gap():
    assert [f"{number:04}" for number in range(1, len(RECORDS) + 1)] == NUMBERS


def test_the_list_has_every_record_as_the_record_says():
    listed = (FOLDER / "README.md").read_text(encoding="utf-8")
    rows = [line for line in listed.splitlines() if re.match(r"\| \[\d", line)]
    heads = {path.name: HEAD.match(path.read_text(encoding="utf-8")) for path in RECORDS}
    assert rows == [
        f"| [{head['number']}]({name}) | {head['date']} | {head['title']} | {head['status']} |"
        for name, head in heads.items()
    ]
