"""What a new plugin is called in the four places where it has a name."""

from __future__ import annotations

import keyword
import re
import sys
from collections.abc import Collection
from dataclasses import dataclass

from veomni_core.errors import ConfigError

_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")


@dataclass(frozen=True)
class PluginNames:
    """``plugin`` is the entry point and the kernel's name, ``distribution`` the wheel's, ``package`` the import's."""

    plugin: str

    @property
    def distribution(self) -> str:
        return f"veomni-{self.plugin}"

    @property
    def package(self) -> str:
        return self.distribution.replace("-", "_")


def checked_names(name: str, taken: Collection[str]) -> PluginNames:
    """The names of the plugin ``name``.

    Args:
        name: lower-case letters, digits and single hyphens, beginning with a letter.
        taken: names that the new plugin can't have: those of the plugins and the distributions that are here.

    Raises:
        ConfigError: ``name`` has another form, is a word of Python's or a module of its library, or is taken.
    """
    if not _NAME.fullmatch(name) or "--" in name:
        raise ConfigError(
            f"{name!r} can't name a plugin: write lower-case letters, digits and single hyphens, a letter first"
        )
    if keyword.iskeyword(name) or name in sys.stdlib_module_names:
        raise ConfigError(f"{name!r} can't name a plugin: it is a word of Python's or a module of its library")
    names = PluginNames(name)
    if names.plugin in taken or names.distribution in taken:
        raise ConfigError(f"{name!r} can't name a new plugin: one of that name is installed; choose another name")
    return names
