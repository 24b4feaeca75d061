"""The pages that list kernels, ops, hooks and errors are what the code has."""

from __future__ import annotations

import dataclasses
import re

import pytest

from reference_pages import FOLDER, PAGES, hooks, kernels, markdown
from reference_pages.repository import ROOT, registry
from veomni_core import errors
from veomni_core.descriptions import hookspecs


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_current(name):
    assert (FOLDER / name).read_text(encoding="utf-8") == PAGES[name](), (
        f"{name} is not what the code says: make reference"
    )


def test_every_field_of_a_description_is_explained():
    for description in hookspecs.DESCRIPTIONS.values():
        said = hooks.arguments(description)
        assert [f.name for f in dataclasses.fields(description) if f.init and not said.get(f.name)] == []


def _is_an_error(each):
    return isinstance(each, type) and issubclass(each, errors.VeOmniError) and each is not errors.VeOmniError


def test_each_page_has_a_heading_for_each_thing():
    known = {
        "errors.md": [name for name, each in vars(errors).items() if _is_an_error(each)],
        "hooks.md": [*hookspecs.DESCRIPTIONS],
        "ops.md": [*registry().ops],
        "kernels.md": [*registry().ops],
    }
    for page, names in known.items():
        text = (FOLDER / page).read_text(encoding="utf-8")
        assert sorted(re.findall(r"^##+ `(\w+)`$", text, re.MULTILINE)) == sorted(names), page


def test_kernels_are_measured_on_pages_of_their_own_op():
    assert kernels.MEASURED.keys() <= registry().ops.keys()
    for pages in kernels.MEASURED.values():
        assert all((ROOT / "docs" / "benchmarks" / f"{page}.md").is_file() for page in pages)


def test_a_docstring_s_paragraphs_and_items_are_lines():
    def documented():
        """One sentence
        on two lines, of :class:`a.b.Name`.

        A list:

        - its first
          item;
        - its second.

        Args:
            none: of these.
        """

    assert (
        markdown.prose(documented)
        == "One sentence on two lines, of `Name`.\n\nA list:\n\n- its first item;\n- its second."
    )
