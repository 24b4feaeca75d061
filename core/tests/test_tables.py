"""Tables keep to the terminal's width, and every word in them stays whole."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
import termios
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from veomni_core.tables import fit, render_table, terminal_width

WORDS = st.lists(st.text("ab_/.:=", min_size=1, max_size=30), max_size=12).map(" ".join)
ROWS = st.lists(st.tuples(WORDS, WORDS, WORDS), max_size=4)
NAMES = ("field", "bound/found", "left eager, and why")


@given(rows=ROWS, width=st.integers(20, 160))
def test_no_word_is_broken_and_no_line_is_wider_than_it_may_be(rows, width):
    text = render_table(NAMES, rows, "A title of several words", width)
    words = {word for row in rows for cell in row for word in cell.split()}
    assert words <= {*text.split()}
    longest = max([*map(len, words), 0])
    assert all(len(line) <= max(width, longest + 2) for line in text.splitlines())


def test_the_widest_columns_are_narrowed_and_the_others_keep_their_words():
    rows = [("cross_entropy_loss_implementation", "no: this kernel is for another device than the one that is here")]
    head, *_ = render_table(("field", "why"), rows, width=60).splitlines()
    assert head == "┏" + "━" * 35 + "┳" + "━" * 22 + "┓"


def test_a_table_whose_words_do_not_fit_becomes_records():
    rows = [("a_name_of_twenty_char", "", "it stays\nfor good"), ("-", "1/2", "x" * 30)]
    assert render_table(NAMES, rows, "Title", 40).splitlines() == [
        "Title",
        "",
        "field",
        "  a_name_of_twenty_char",
        "left eager, and why  it stays",
        "                     for good",
        "",
        "field                -",
        "bound/found          1/2",
        "left eager, and why",
        "  " + "x" * 30,
    ]


def test_wide_characters_stay_whole_too():
    path = "/数据/模型/千问/权重"
    text = render_table(("path", "state"), [(path, "loaded, and then some words")], width=44)
    assert path in text and all(cell_len(line) <= 44 for line in text.splitlines())


def test_square_brackets_are_no_markup():
    assert "files=[a.txt, b.txt] [bold]x" in render_table(("value",), [("files=[a.txt, b.txt] [bold]x",)])


def test_a_table_that_goes_to_no_terminal_is_as_wide_as_its_words_need(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    rows = [("a" * 90, "b" * 90), ("short words " * 20, "")]
    text = render_table(("one", "two"), rows)
    assert "a" * 90 in text and "b" * 90 in text and "┏" in text
    assert max(map(len, text.splitlines())) == 90 + 90 + 7
    assert fit("word " * 100) == "word " * 100


def test_a_line_is_broken_between_words_and_indented():
    assert fit("  assumed: flash-attn-3>=3.0.0b1,<4 of it", 20).splitlines() == [
        "  assumed:",
        "    flash-attn-3>=3.0.0b1,<4",
        "    of it",
    ]


@pytest.mark.parametrize("columns, width", [("72", 72), ("", None), ("0", None), ("wide", None)])
def test_columns_say_how_wide_the_terminal_is(monkeypatch, columns, width):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert terminal_width() == width


def test_the_terminal_that_standard_output_goes_to_says_how_wide_it_is(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    reader, writer = pty.openpty()
    termios.tcsetwinsize(writer, (24, 61))
    with os.fdopen(writer, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        assert terminal_width() == 61
        monkeypatch.undo()
    os.close(reader)


def test_the_first_table_of_a_process_draws_no_random_number():
    code = """
        import random
        from veomni_core.tables import render_table
        before = random.getstate()
        render_table(("op",), [("rms_norm",)])
        assert random.getstate() == before
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)
