"""The fenced blocks of the documentation's pages, and how each of them is run.

A page is run in a folder of its own, from its first block to its last:

- a block whose first line is a comment with nothing but a file's name (``# job.yaml``) is written to that file;
- Python is executed, with the names of the page's earlier blocks; one that holds ``>>>`` is run as a doctest;
- YAML that names a model is a job, and is planned, as ``job.yaml`` if it has no name; other YAML is read as a part of
  one;
- JSON and TOML are read;
- of a console's block each command is run, and what stands below it in the block is what it prints.

An HTML comment above a block says what else is true of it:

- ``<!-- not run: REASON -->``;
- ``<!-- run by PATH/OF/A/TEST.py -->``, a test that names the page;
- ``<!-- output -->``: what the block before it printed;
- ``<!-- planned for h200 -->``: the hardware that a job is for;
- ``<!-- exits with 1 -->``: the exit code of the block's last command.

Output is compared as doctest does: white space counts once, and ``...`` stands for anything.
Two comments hold for a whole page, on lines of their own: ``<!-- all run by PATH/OF/A/TEST.py -->`` marks all blocks
that have no mark, and ``<!-- plugins: NAME, NAME -->`` says which plugins the page's reader has installed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from generated import generated_pages

ROOT = Path(__file__).resolve().parent.parent
SHELLS = ("", "bash", "console", "sh", "shell")
NO_CODE = ("mermaid", "{")  # drawings, which other tests compare with the code; and MyST's directives
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>[\w{}-]*)[^\n]*\n(?P<text>.*?)^ *```[ \t]*$", re.MULTILINE | re.DOTALL
)
_COMMENT_ABOVE = re.compile(r"<!--((?:(?!-->).)*)-->\s*\Z", re.DOTALL)
_FILE = re.compile(r"(?:#|//) ?([\w./-]+\.\w+)\s*\Z")
_MARKS = ("not run: ", "run by ", "output", "planned for ", "exits with ")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        page: the page's path.
        line: the number of the line with the opening fence.
        language: what stands behind the fence; may be empty.
        text: the block's lines, without the indentation of its fence.
        mark: the HTML comment above the block, or the page's, without its arrows; empty if there is none.
    """

    page: Path
    line: int
    language: str
    text: str
    mark: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def file(self) -> str:
        """The file's name that the first line says; empty if it says none."""
        named = _FILE.match(self.text.partition("\n")[0])
        return named[1] if named else ""

    @property
    def is_run(self) -> bool:
        """Whether the block is run with its page, and not by another test or by nobody."""
        return not self.mark.startswith(("not run: ", "run by ")) and not self.language.startswith(NO_CODE)

    def value(self, mark: str) -> str:
        """What follows ``mark`` in the block's mark; empty if the block has another one."""
        return self.mark.removeprefix(mark) if self.mark.startswith(mark) else ""


def pages() -> list[Path]:
    """Every page of Markdown of the repository, without those that are generated when the site is built."""
    skipped = {".venv", "dist", "runs"}
    found = {page for page in ROOT.glob("**/*.md") if not skipped & {*page.relative_to(ROOT).parts}}
    return sorted(found - generated_pages())


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    elsewhere = re.search(r"^<!-- all (run by \S+) -->", text, re.MULTILINE)
    for fence in FENCE.finditer(text):
        above = _COMMENT_ABOVE.search(text[: fence.start()].rstrip(" "))
        comment = " ".join(above[1].split()) if above else ""
        yield Block(
            page,
            line=text.count("\n", 0, fence.start()) + 1,
            language=fence["language"],
            text=re.sub(f"^{fence['indent']}", "", fence["text"], flags=re.MULTILINE),
            mark=comment if comment.startswith(_MARKS) else elsewhere[1] if elsewhere else "",
        )


def plugins(page: Path) -> str:
    """The plugins that the page's reader has installed, separated by commas; empty if the page doesn't say."""
    named = re.search(r"^<!-- plugins: (.*?) -->", page.read_text(encoding="utf-8"), re.MULTILINE)
    return named[1].replace(" ", "") if named else ""


def commands(block: Block) -> Iterator[tuple[str, str]]:
    """Each command of a console's block, and what stands below it: the output that is expected, or nothing.

    Where a line starts with ``$ ``, only such lines are commands; otherwise every line is one.
    """
    lines = block.text.replace("\\\n", " ").splitlines()
    if not any(line.startswith("$ ") for line in lines):
        yield from ((line.partition(" #")[0].strip(), "") for line in lines if line.strip())
        return
    command, printed = "", []
    for line in lines:
        if line.startswith("$ "):
            if command:
                yield command, "\n".join(printed)
            command, printed = line[2:].partition(" #")[0].strip(), []
        else:
            printed.append(line)
    yield command, "\n".join(printed)
