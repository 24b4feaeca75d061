"""Fills in the templates and writes the folder of a new plugin."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from string import Template

from veomni_core.errors import ConfigError
from veomni_tools.scaffold.kinds import Kind
from veomni_tools.scaffold.names import PluginNames

SUFFIX = ".template"
WORDS = "words.toml"  # in a kind's folder: what stands for it in the templates that kinds share
LICENCES = {"apache-2.0": "Apache-2.0", "mit": "MIT", "bsd-3-clause": "BSD-3-Clause"}


def rendered(names: PluginNames, kind: Kind, licence: str) -> dict[str, str]:
    """The text of each file of the plugin, by its path in the plugin's folder.

    Args:
        names: what the plugin is called.
        kind: what it brings.
        licence: a key of ``LICENCES``.

    Raises:
        ConfigError: there is no text of ``licence``.
    """
    if licence not in LICENCES:
        raise ConfigError(f"there is no text of the licence {licence!r}; there is one of: {', '.join(LICENCES)}")
    templates = files(__package__) / "templates"
    folders = [templates / name for name in kind.folders]
    words = {
        "plugin": names.plugin,
        "distribution": names.distribution,
        "package": names.package,
        "licence": LICENCES[licence],
        **kind.names,
    }
    for folder in folders:
        words |= _own_words(folder, words)
    found = {path: template for folder in folders for path, template in _below(folder)}
    texts = {path.replace("PACKAGE", names.package): _filled(template, words) for path, template in found.items()}
    texts["LICENSE"] = _filled(templates / "licences" / f"{licence}{SUFFIX}", words)
    return texts


def write(texts: Mapping[str, str], folder: Path) -> None:
    """Write each file of ``texts`` below ``folder``, which is made.

    Raises:
        ConfigError: ``folder`` exists. Nothing is written then.
    """
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise ConfigError(f"{folder} exists, and nothing is overwritten; name another by --folder") from None
    for path, text in texts.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")


def _own_words(folder: Traversable, words: Mapping[str, str]) -> dict[str, str]:
    """What the folder's ``words.toml`` says, with ``words`` filled in; a list becomes the inside of one in TOML."""
    file = folder / WORDS
    said = tomllib.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    texts = {
        name: ", ".join(map(json.dumps, value)) if isinstance(value, list) else value.rstrip()
        for name, value in said.items()
    }
    return {name: Template(text).substitute(words) for name, text in texts.items()}


def _below(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, Traversable]]:
    """The templates in ``folder``, by their paths. ``PACKAGE`` stands there for the plugin's package."""
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _below(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(SUFFIX):
            yield prefix + entry.name.removesuffix(SUFFIX), entry


def _filled(template: Traversable, words: Mapping[str, str]) -> str:
    """The template's text with ``words`` in it, ending in one newline unless it is empty."""
    text = Template(template.read_text(encoding="utf-8")).substitute(words).rstrip()
    return f"{text}\n" if text else ""
