"""The public API is what docs/reference/public_api.txt lists: a change of it is seen in a review."""

from __future__ import annotations

import ast
import importlib

import pytest

import public_api
import veomni_core


def test_the_api_is_as_listed() -> None:
    assert public_api.PAGE.read_text("utf-8") == public_api.listing(), (
        "the public API changed. If that is meant: make generate, and a fragment in changes/"
    )


@pytest.mark.parametrize(
    "change",
    [
        "def bind(model, config, more): pass",
        "def bind(model, config=None): pass",
        "def bind(model, config) -> int: pass",
        "def tie(model, config): pass",
    ],
)
def test_another_signature_is_another_listing(change: str) -> None:
    (before,) = ast.parse("def bind(model, config): pass").body
    (after,) = ast.parse(change).body
    assert [*public_api.described(before)] != [*public_api.described(after)]  # type: ignore[arg-type]


def test_a_class_is_listed_with_what_is_called_of_it() -> None:
    source = """
class Kernel(Base):
    name: str = "x"
    _hidden: int = 0
    @property
    def label(self) -> str: ...
    def _own(self): ...
    def __or__(self, other): ...
"""
    (node,) = ast.parse(source).body
    assert [*public_api.described(node)] == [  # type: ignore[arg-type]
        "class Kernel(Base)",
        "  name: str = 'x'",
        "  @property def label(self) -> str",
        "  def __or__(self, other)",
    ]


def test_every_listed_name_of_the_core_can_be_imported() -> None:
    for module in public_api.MODULES["veomni-core"]:
        imported = importlib.import_module(module)
        names = {
            line.split("(")[0].split()[1] for line in public_api.of_module(module) if line.startswith(("def", "class"))
        }
        assert not [name for name in names if not hasattr(imported, name)]
    assert {*veomni_core.__all__} <= {*dir(veomni_core)} | {*veomni_core._HOME}
