"""What the repository's own distributions describe, whatever else is installed."""

from __future__ import annotations

import functools
import tomllib
from pathlib import Path

from veomni_core.discovery.discover import discover
from veomni_core.discovery.registry import Registry

ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def registry() -> Registry:
    """The registry of the repository's plugins, each of which must load."""
    names = []
    for file in ROOT.glob("plugins/*/pyproject.toml"):
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        names += project.get("entry-points", {}).get("veomni.plugins", {})
    return discover({"VEOMNI_PLUGINS": ",".join(sorted(names)), "VEOMNI_PLUGINS_STRICT": "1"})
