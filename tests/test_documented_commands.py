"""Every command that a page of Markdown tells its reader to run is there, with the options that it is given."""

from __future__ import annotations

import importlib.util
import re
import shlex
import tomllib
from collections.abc import Collection, Iterator

import pytest
from typer.main import get_command

from documented_code import FENCE, ROOT, SHELLS, blocks, pages
from veomni_core.cli.app import build_app

pytestmark = pytest.mark.docs

PAGES = pages()
TARGETS = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
PLUGINS = {
    name
    for file in [*ROOT.glob("plugins/*/pyproject.toml"), *ROOT.glob("examples/*/pyproject.toml")]
    for project in [tomllib.loads(file.read_text(encoding="utf-8"))["project"]]
    for name in (project["name"], *project.get("entry-points", {}).get("veomni.plugins", ()))
}
_HELP = {"-h", "--help"}  # click adds them to every verb
IMAGINED = {"acme"}  # the plugin that the how-to writes
VEOMNI = get_command(build_app())


def commands(page: str) -> Iterator[str]:
    """The shell lines of a page: of blocks that are no other language, and of code within a sentence."""
    for fence in FENCE.finditer(page):
        if fence["language"] in SHELLS:
            for line in fence["text"].splitlines():
                yield from re.split(r"&&|;|\|", line.strip().removeprefix("$ ").partition(" #")[0])
    yield from (" ".join(code.split()) for code in re.findall(r"`([^`]+)`", FENCE.sub("", page)))


def problem(command: str, written: Collection[str] = ()) -> str:
    """What of a command isn't there; empty where it is, or where it is no command of this project.

    Args:
        command: a line of a shell.
        written: the files that the page has its reader write.
    """
    try:
        words = shlex.split(command.replace("\\|", "|"))
    except ValueError:
        return ""  # code that is no shell line
    words = [word for word in words if not re.fullmatch(r"[A-Z_]+=.*", word)]
    if words[:1] == ["veomni"] and words[1:]:
        return _problem_of_veomni(words[1:])
    if words[:3] == ["python", "-m", "veomni_core.cli"] and words[3:]:
        return _problem_of_veomni(words[3:])
    if words[:2] == ["python", "-m"] and words[2:]:
        return "" if importlib.util.find_spec(words[2].partition(".")[0]) else f"no module {words[2]}"
    if words[:1] == ["make"] and words[1:]:
        missing = [word for word in words[1:] if "=" not in word and word not in TARGETS]
        return f"no target {missing}" if missing else ""
    if words and words[0] in ("python", "pytest", "torchrun"):
        named = [
            word for word in words[1:] if re.fullmatch(r"[\w/]+\.py", word) or word.startswith(("plugins/", "tests/"))
        ]
        missing = [word for word in named if word not in written and not (ROOT / word.partition("::")[0]).exists()]
        return f"no file {missing}" if missing else ""
    return ""


def _problem_of_veomni(words: list[str]) -> str:
    verb, *rest = words
    if verb.startswith("-"):
        options = {option for parameter in VEOMNI.params for option in parameter.opts} | _HELP
        return "" if verb in options else f"no option {verb}"
    found = VEOMNI.get_command(None, verb)
    if found is None:
        return f"no verb {verb!r}"
    if hasattr(found, "commands") and rest:
        verb, found = f"{verb} {rest[0]}", found.commands.get(rest.pop(0))
        if found is None:
            return f"no verb {verb!r}"
    options = {option for parameter in found.params for option in parameter.opts} | _HELP
    unknown = [word for word in rest if word.startswith("--") and word.strip("[]").partition("=")[0] not in options]
    if unknown:
        return f"veomni {verb} has no option {unknown}"
    # A plugin comes first, or none is named; NAME stands for one.
    first = [word for word in rest[:1] if verb == "verify" and not word.startswith("-") and not word.isupper()]
    named = [word for word in first if word not in PLUGINS | IMAGINED]
    return f"no plugin {named}" if named else ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_a_page_are_there(page):
    written = {block.file for block in blocks(page)}
    problems = {command: problem(command, written) for command in commands(page.read_text(encoding="utf-8"))}
    assert not {command: what for command, what in problems.items() if what}


def test_commands_are_found_in_pages():
    found = {
        word for page in PAGES for command in commands(page.read_text(encoding="utf-8")) for word in command.split()
    }
    assert {"veomni", "make", "python", "pytest", "verify", "train", "demo"} <= found


@pytest.mark.parametrize(
    "command, what",
    [
        ("veomni verfy veomni-torch", "no verb 'verfy'"),
        ("veomni verify fused_quack --device cuda", "no plugin ['fused_quack']"),
        ("veomni --versoin", "no option --versoin"),
        ("veomni plan job.yaml --hardwear h200", "veomni plan has no option ['--hardwear']"),
        ("make benchmark", "no target ['benchmark']"),
        ("python benchmarks/nothing.py", "no file ['benchmarks/nothing.py']"),
        ("python -m veomni_nothing", "no module veomni_nothing"),
        ("pytest tests/test_nothing.py -k memory", "no file ['tests/test_nothing.py']"),
    ],
)
def test_a_command_that_is_not_there_is_seen(command, what):
    assert problem(command) == what


def test_a_file_that_the_page_has_written_is_there():
    assert problem("python train.py job.yaml", {"train.py"}) == ""
    assert problem("python train.py job.yaml", {"other.py"}) == "no file ['train.py']"
