"""Importing the bridges needs none of their libraries, and a missing one is named with its extra."""

from __future__ import annotations

import doctest

import pytest

import veomni_bridges.transformers
from veomni_bridges.libraries import require
from veomni_core.errors import HostError


def test_a_library_that_is_missing_or_old_is_named_with_its_extra():
    require("transformers", "5.2", extra="transformers")
    with pytest.raises(HostError, match=r"needs acme 2 or newer, and it is not installed: .*veomni-bridges\[acme\]"):
        require("acme", "2", extra="acme")
    with pytest.raises(HostError, match=r"needs torch 99 or newer, and 2\.\d+.* is here"):
        require("torch", "99", extra="torch")


def test_the_examples_give_what_they_show(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert doctest.testmod(veomni_bridges.transformers).failed == 0
