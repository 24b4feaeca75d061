"""The pictures of a plan and of a receipt show what is printed now, and fetch nothing."""

from __future__ import annotations

import re

import pytest

from printed_pictures import FOLDER, PICTURES, picture

pytestmark = pytest.mark.docs


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_current(name):
    assert (FOLDER / f"{name}.svg").read_text(encoding="utf-8") == picture(name), "run: make generate"


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_fetches_nothing(name):
    drawn = (FOLDER / f"{name}.svg").read_text(encoding="utf-8")
    assert {*re.findall(r"https?://[^\s\"')]+", drawn)} == {"http://www.w3.org/2000/svg"}
    assert "@import" not in drawn and "@font-face" not in drawn
