"""With the metapackage a model binds: each distribution that this takes is among what it requires."""

from __future__ import annotations

import tomllib
from importlib.metadata import requires, version
from pathlib import Path

from packaging.requirements import Requirement

from veomni_core import discover

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_what_it_requires_finds_and_serves_every_op():
    required = {Requirement(text).name for text in PROJECT["dependencies"]}
    assert required <= {"veomni-core", *(plugin.distribution for plugin in discover({}).plugins)}
    definitions = {plugin.distribution for plugin in discover({}).plugins if plugin.defines}
    assert definitions - {"veomni-patchgen", "veomni-tools"} <= required and "veomni-torch" in required


def test_all_that_is_required_has_one_version():
    assert {version(Requirement(text).name) for text in PROJECT["dependencies"]} == {PROJECT["version"]}
    assert all(Requirement(text).name for text in requires("veomni-kernels") or ())
