"""The planted package, in Python's path for one test."""

from __future__ import annotations

import sys

import pytest
from planted_upstream import Planted


@pytest.fixture
def planted(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # it would hide a file of the same second and length
    yield Planted(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("planted", "patches", "sibling")]:
        del sys.modules[name]
