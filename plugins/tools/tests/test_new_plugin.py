"""What ``veomni new-plugin`` writes, and what it refuses."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib

import pytest

from veomni_core.errors import ConfigError
from veomni_tools.scaffold.kinds import device_type, kernel_of, new_op, triton_kernel
from veomni_tools.scaffold.names import checked_names
from veomni_tools.scaffold.render import LICENCES, rendered, write

KINDS = {
    "kernel": kernel_of("rms_norm"),
    "triton": triton_kernel(),
    "new op": new_op("relu_squared", ()),
    "device": device_type("hpu", ()),
}


@pytest.mark.parametrize("licence", LICENCES)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_its_files_parse_and_have_its_names(kind, licence):
    texts = rendered(checked_names("acme-fast", ()), kind, licence)
    project = tomllib.loads(texts["pyproject.toml"])["project"]
    assert (project["name"], project["license"]) == ("veomni-acme-fast", LICENCES[licence])
    assert project["entry-points"]["veomni.plugins"] == {"acme-fast": "veomni_acme_fast.plugin"}
    for path, text in texts.items():
        if path.endswith(".py"):
            ast.parse(text, path)
        assert "PACKAGE" not in path
    assert "src/veomni_acme_fast/py.typed" in texts
    assert "veomni verify acme-fast" in texts["README.md"]


@pytest.mark.parametrize("name", ["a", "a-name-of-thirty-two-characters-x"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_its_files_are_formatted_whatever_its_name_is(kind, name, tmp_path):
    pytest.importorskip("ruff")
    write(rendered(checked_names(name, ()), kind, "mit"), tmp_path / "new")
    for command in (("format", "--check"), ("check",)):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--isolated", "--line-length=120", "--no-cache", "."],
            cwd=tmp_path / "new",
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout


def test_each_kind_says_what_its_plugin_brings():
    texts = {name: rendered(checked_names("acme", ()), kind, "mit") for name, kind in KINDS.items()}
    assert "device type `hpu`" in texts["device"]["README.md"]
    assert "hardware=DEVICE" in texts["device"]["src/veomni_acme/plugin.py"]
    assert "relu_squared_implementation: acme" in texts["new op"]["README.md"]
    assert 'op_name="relu_squared"' in texts["new op"]["src/veomni_acme/contract.py"]
    assert "@triton.jit" in texts["triton"]["src/veomni_acme/rms_norm_kernels.py"]
    (needed,) = [line for line in texts["triton"]["pyproject.toml"].splitlines() if line.startswith("dependencies")]
    assert "triton>=" in needed
    assert texts["device"]["src/veomni_acme/rms_norm.py"] == texts["kernel"]["src/veomni_acme/rms_norm.py"]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_ci_runs_what_the_readme_says_and_a_machine_without_an_accelerator_can(kind):
    texts = rendered(checked_names("acme", ()), kind, "mit")
    told = set(re.findall(r"^\$ (.+)$", texts["README.md"], re.MULTILINE))
    run = set(re.findall(r"- run: (.+)$", texts[".github/workflows/test.yml"], re.MULTILINE))
    assert {command for command in told - run if not command.startswith("veomni explain")} == {"veomni verify acme"}
    assert run <= told


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


@pytest.mark.parametrize(
    "name", ["Relu", "relu-squared", "_relu", "relu_", "a__b", "1relu", "../relu", "", "relú", "class"]
)
@pytest.mark.parametrize("kind_of_name", [new_op, device_type])
def test_an_op_or_a_device_of_another_form_is_refused(kind_of_name, name):
    with pytest.raises(ConfigError, match="single underscores"):
        kind_of_name(name, ())


def test_an_op_or_a_licence_without_a_template_is_refused():
    names = checked_names("acme", ())
    with pytest.raises(ConfigError, match="'attention'; there is one for: rms_norm"):
        kernel_of("attention")
    with pytest.raises(ConfigError, match="'gpl'; there is one of: apache-2.0, mit"):
        rendered(names, kernel_of("rms_norm"), "gpl")


def test_an_existing_folder_is_left_as_it_is(tmp_path):
    (tmp_path / "kept").write_text("mine")
    with pytest.raises(ConfigError, match="nothing is overwritten"):
        write({"kept": "theirs"}, tmp_path)
    assert (tmp_path / "kept").read_text() == "mine"


@pytest.mark.parametrize(
    "options, problem",
    [
        (("--device", "hpu", "--triton"), "--device and --triton: a new plugin is of one kind"),
        (("--op", "rms_norm", "--new-op", "mine"), "--op and --new-op: a new plugin is of one kind"),
        (("--new-op", "rms_norm"), "'rms_norm' can't name an op of a new plugin: there is one of that name"),
        (("--new-op", "moe"), "'moe' can't name an op of a new plugin"),  # moe_implementation is moe_experts' field
        (("--device", "cuda"), "'cuda' can't name a device of a new plugin: there is one of that name"),
        (("--device", "auto"), "'auto' can't name a device of a new plugin"),  # it is a preset
        (("--op", ""), "there is no template of a kernel for ''"),
    ],
)
def test_options_that_can_not_be_used_write_nothing(veomni, tmp_path, options, problem):
    said = veomni("new-plugin", "acme", *options, "--folder", tmp_path / "new", code=2)
    assert problem in " ".join(said.split())
    assert not (tmp_path / "new").exists()
