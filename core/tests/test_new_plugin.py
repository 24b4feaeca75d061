"""What ``veomni new-plugin`` writes, and what it refuses."""

from __future__ import annotations

import ast
import tomllib

import pytest

from veomni_core.errors import ConfigError
from veomni_core.scaffold.names import checked_names
from veomni_core.scaffold.render import LICENCES, OPS, rendered, write


@pytest.mark.parametrize("licence", LICENCES)
@pytest.mark.parametrize("op", OPS)
def test_its_files_parse_and_have_its_names(op, licence):
    texts = rendered(checked_names("acme-fast", ()), op, licence)
    project = tomllib.loads(texts["pyproject.toml"])["project"]
    assert (project["name"], project["license"]) == ("veomni-acme-fast", LICENCES[licence])
    assert project["entry-points"]["veomni.plugins"] == {"acme-fast": "veomni_acme_fast.plugin"}
    for path, text in texts.items():
        if path.endswith(".py"):
            ast.parse(text, path)
        assert "PACKAGE" not in path
    assert "src/veomni_acme_fast/py.typed" in texts
    assert "veomni verify acme-fast" in texts["README.md"]


@pytest.mark.parametrize("name", ["Acme", "acme_fast", "-acme", "acme-", "a--b", "1acme", "../acme", "", "acmé"])
def test_a_name_of_another_form_is_refused(name):
    with pytest.raises(ConfigError, match="lower-case letters"):
        checked_names(name, ())


@pytest.mark.parametrize("name", ["class", "json"])
def test_a_word_of_python_s_is_refused(name):
    with pytest.raises(ConfigError, match="a word of Python's"):
        checked_names(name, ())


@pytest.mark.parametrize("taken", ["torch", "veomni-torch"])
def test_the_name_of_what_is_installed_is_refused(taken):
    with pytest.raises(ConfigError, match="is installed"):
        checked_names("torch", {taken})


def test_an_op_or_a_licence_without_a_template_is_refused():
    names = checked_names("acme", ())
    with pytest.raises(ConfigError, match="'attention'; there is one for: rms_norm"):
        rendered(names, "attention", "mit")
    with pytest.raises(ConfigError, match="'gpl'; there is one of: apache-2.0, mit"):
        rendered(names, "rms_norm", "gpl")


def test_an_existing_folder_is_left_as_it_is(tmp_path):
    (tmp_path / "kept").write_text("mine")
    with pytest.raises(ConfigError, match="nothing is overwritten"):
        write({"kept": "theirs"}, tmp_path)
    assert (tmp_path / "kept").read_text() == "mine"
