"""Fills in the templates and writes the folder of a new plugin."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from string import Template

from veomni_core.errors import ConfigError
from veomni_core.scaffold.names import PluginNames

SUFFIX = ".template"
OPS = ("rms_norm",)
LICENCES = {"apache-2.0": "Apache-2.0", "mit": "MIT", "bsd-3-clause": "BSD-3-Clause"}


def rendered(names: PluginNames, op: str, licence: str) -> dict[str, str]:
    """The text of each file of the plugin, by its path in the plugin's folder.

    Args:
        names: what the plugin is called.
        op: the op of its kernel, one of ``OPS``.
        licence: a key of ``LICENCES``.

    Raises:
        ConfigError: there is no template for ``op``, or no text of ``licence``.
    """
    if op not in OPS:
        raise ConfigError(f"there is no template of a kernel for {op!r}; there is one for: {', '.join(OPS)}")
    if licence not in LICENCES:
        raise ConfigError(f"there is no text of the licence {licence!r}; there is one of: {', '.join(LICENCES)}")
    templates = files(__package__) / "templates"
    words = {
        "plugin": names.plugin,
        "distribution": names.distribution,
        "package": names.package,
        "licence": LICENCES[licence],
    }
    found = _below(templates / op)
    texts = {path.replace("PACKAGE", names.package): _filled(template, words) for path, template in found}
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


def _below(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, Traversable]]:
    """The templates in ``folder``, by their paths. ``PACKAGE`` stands there for the plugin's package."""
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _below(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(SUFFIX):
            yield prefix + entry.name.removesuffix(SUFFIX), entry


def _filled(template: Traversable, words: Mapping[str, str]) -> str:
    return Template(template.read_text(encoding="utf-8")).substitute(words)
