"""``veomni patchgen`` as a command: what it writes, and what ``--check`` says when upstream or a file has changed."""

from __future__ import annotations

import subprocess
import sys

import pytest
import typer

from veomni_core.errors import ConfigError, HostError
from veomni_patchgen import PatchError
from veomni_patchgen.cli import patchgen
from veomni_transformers.generated_modeling import load_generated

PATCHES = """
@config.override_method("DenseNorm.forward", description="twice")
def forward(self, x):
    return 2 * x

@config.override_method("DenseModel.forward", declares="no cache in training")
def without_cache(self, x):
    return DenseOutput(hidden=self.norm.forward(x))
"""


@pytest.fixture
def file(planted, monkeypatch):
    planted.patches(PATCHES)
    monkeypatch.chdir(planted.folder)
    patchgen(["patches.py"])
    return planted.folder / "generated" / "patched_dense.py"


def check(capsys, *, passes=False, **options):
    capsys.readouterr()
    if passes:
        patchgen(["patches.py"], check=True, **options)
    else:
        with pytest.raises(typer.Exit):
            patchgen(["patches.py"], check=True, **options)
    return capsys.readouterr().out


def test_files_are_written_listed_and_found_unchanged(planted, file, capsys):
    assert (
        file.exists()
        and "+    # patchgen: override_method DenseNorm.forward: twice" in file.with_suffix(".diff").read_text()
    )
    said = check(capsys, passes=True)
    assert "up to date; not compared with upstream: it has no @config.example" in said
    assert "override_method DenseModel.forward declares: no cache in training" in said
    (planted.folder / "other.py").write_text("PatchConfig = 3\n")
    patchgen(list_only=True)
    listed = capsys.readouterr().out
    assert "patches.py" in listed and "planted.modeling_dense" in listed and "other.py" not in listed
    patchgen(["patches.py"], diff=True, verbose=True, output=planted.folder / "elsewhere")
    printed = capsys.readouterr().out
    assert "-        y = x * self.width" in printed and "left out, since nothing uses it any more" in printed
    assert (planted.folder / "elsewhere" / file.name).read_text() == file.read_text()


def test_all_takes_every_file_with_a_config_here_and_below(planted, file, capsys):
    below = planted.folder / "below"
    below.mkdir()
    made = (planted.folder / "patches.py").read_text()
    made = made.replace("from veomni_patchgen import PatchConfig, create_patch_from_external", "import veomni_patchgen")
    made = made.replace("config = PatchConfig(", "config: object = veomni_patchgen.PatchConfig(", 1)
    (below / "more.py").write_text(made)
    (below / "none.py").write_text("raise ImportError('it is not imported: it makes no PatchConfig')\n")
    patchgen(all_patches=True)
    assert (below / "generated" / file.name).read_text() == file.read_text()
    planted.change("        return y + self.eps\n", "        return y - self.eps\n")
    capsys.readouterr()
    with pytest.raises(typer.Exit):
        patchgen(all_patches=True, check=True)
    assert capsys.readouterr().out.count("moved under override_method DenseNorm.forward") == 2


def test_another_layout_is_no_difference_but_an_edit_is(file, capsys):
    text = file.read_text()
    file.write_text(text.replace("return 2 * x", "return (\n            2\n            * x\n        )"))
    file.with_suffix(".diff").unlink()
    assert "patched_dense.diff is missing or old" in check(capsys)
    file.write_text(text.replace("return 2 * x", "return 3 * x"))
    said = check(capsys)
    assert "edited by hand" in said and "return 3 * x" in said
    check(capsys, passes=True, fix=True)
    assert file.read_text() == text
    check(capsys, passes=True)


def test_what_moved_upstream_is_said_per_patch(planted, file, capsys):
    planted.change("        return y + self.eps\n", "        y = y / 2\n        return y + self.eps\n")
    said = check(capsys)
    line = 1 + (planted.folder / "planted/modeling_dense.py").read_text().splitlines().index("        y = y / 2")
    assert (
        f"upstream's line {line} moved under override_method DenseNorm.forward" in said and "+        y = y / 2" in said
    )
    assert "DenseModel.forward\n" not in said.partition("declares")[0]
    check(capsys, passes=True, fix=True)
    planted.change("def rotate_half(x):\n", "def rotate_half(x):\n    assert x\n")
    assert "planted.modeling_dense has changed" in check(capsys) and "none of it is under a patch" in check(capsys)


NORM = "DenseNorm.forward\n  -    @decorated\n  -    def forward(self, x):\n  -        y = x * self.width"
LOST = "DenseModel.forward: DenseOutput (upstream's line 10) has no field hidden. Its fields: cache, states"


@pytest.mark.parametrize(
    ("old", "new", "words", "lines"),
    [
        ("    def forward(self, x):\n        y", "    def run(self, x):\n        y", "has no such method", NORM),
        ("DenseNorm", "DenseRMSNorm", "no class DenseNorm. Did you mean 'DenseRMSNorm'", NORM),
        ("    hidden: object = None\n", "    states: object = None\n", LOST, ""),
    ],
)
def test_what_is_gone_upstream_is_an_error_with_its_lines(planted, file, capsys, old, new, words, lines):
    planted.change(old, new)
    said = check(capsys)
    assert words in said and lines in said and "none of it" not in said


def test_a_field_that_upstream_begins_to_pass_is_named_with_its_line(planted, file, capsys):
    planted.patches(PATCHES.replace(', declares="no cache in training"', "").replace("(x))", "(x), cache=x)"))
    check(capsys, passes=True, fix=True)
    planted.change("    cache: object = None\n", "    cache: object = None\n    router_logits: object = None\n")
    planted.change("cache=k)", "cache=k, router_logits=q)")
    said = check(capsys)
    assert "DenseModel.forward: upstream passes router_logits to DenseOutput, and the patch does not" in said
    assert "moved under override_method DenseModel.forward" in said and "cache=k, router_logits=q)" in said


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("from planted.modeling_dense import rotate_half", r"cannot import name .* Did you mean 'rotate_by_half'"),
        ("import a_library_that_is_not_here", "No module named 'a_library_that_is_not_here'. Install it, or leave it"),
    ],
)
def test_patches_that_import_what_is_not_there_are_named_and_others_are_checked(planted, file, capsys, line, words):
    (planted.folder / "importing.py").write_text(f"{line}\n{(planted.folder / 'patches.py').read_text()}")
    planted.change("rotate_half", "rotate_by_half")
    with pytest.raises(PatchError, match=f"importing.py can't be imported: {words}"):
        patchgen(["importing.py"])
    capsys.readouterr()
    with pytest.raises(typer.Exit):
        patchgen(all_patches=True, check=True)
    said = capsys.readouterr().out
    assert "importing.py can't be imported" in said and "planted.modeling_dense has changed" in said


def test_all_that_is_gone_is_said_at_once(planted, file, capsys):
    planted.change("DenseNorm", "DenseRMSNorm")
    planted.change("    hidden: object = None\n", "    states: object = None\n")
    said = check(capsys)
    assert "no class DenseNorm" in said and LOST in said


def test_what_moved_in_a_parent_is_under_the_patch_of_the_inherited_method(planted, monkeypatch, capsys):
    planted.change("from .tools import", "from .shared import Shared\nfrom .tools import")
    planted.change("class DenseTalker:", "class DenseTalker(Shared):")
    shared = planted.folder / "planted/shared.py"
    shared.write_text("class Shared:\n    def speak(self):\n        return 1\n")
    planted.patches("""
    @config.override_method("DenseTwin.forward")
    def forward(self, x):
        return x

    @config.modify_method("DenseTalker.speak")
    def speak(original_speak, self):
        return original_speak(self) + 1
    """)
    monkeypatch.chdir(planted.folder)
    patchgen(["patches.py"])
    planted.change("return y + self.eps", "return y - self.eps")
    said = check(capsys)
    assert "moved under override_method DenseTwin.forward" in said and "+        return y - self.eps" in said
    assert "speak" not in said
    check(capsys, passes=True, fix=True)
    shared.write_text(shared.read_text().replace("return 1", "return 2"))
    assert "Shared.speak of planted.shared has changed under modify_method DenseTalker.speak" in check(capsys)


def test_another_line_length_is_no_difference(planted, file, capsys):
    text = file.read_text()
    command = ["ruff", "format", "--isolated", "--line-length", "60", str(file)]
    subprocess.run([sys.executable, "-m", *command], check=True)
    assert file.read_text() != text
    check(capsys, passes=True)


def test_another_modeling_file_can_be_tried_before_it_is_installed(planted, file, capsys):
    newer = planted.folder / "newer.py"
    newer.write_text((planted.folder / "planted/modeling_dense.py").read_text().replace("return y +", "return y -"))
    assert "moved under override_method DenseNorm.forward" in check(capsys, source=newer)


def test_a_file_for_another_upstream_is_not_loaded(planted, file, tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        load_generated(tmp_path / "absent.py")
    with pytest.raises(ConfigError, match="was not written by veomni patchgen"):
        load_generated(planted.folder / "planted/tools.py")
    text = (
        file.read_text()
        .replace("planted.modeling_dense", "transformers.models.llama.modeling_llama")
        .replace('"version": ""', '"version": "4.0"')
    )
    file.write_text(text)
    with pytest.raises(HostError, match=r"generated for transformers 4.0; \d.* is here. Generate it again"):
        load_generated(file)
    import transformers

    file.write_text(text.replace('"4.0"', f'"{transformers.__version__}"'))
    with pytest.raises(HostError, match="is not the one it was made from"):
        load_generated(file)


FORWARD = "    @decorated\n    def forward(self, x):\n        y = x * self.width\n        return y + self.eps\n"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (FORWARD, f"{FORWARD}\n    def forward(self, x):\n        return 9\n", "defines it 2 times; replace the class"),
        (
            "class DenseLayer",
            "class DenseNorm: ...\n\n\nclass DenseLayer",
            "defines DenseNorm 2 times, and a patch can't",
        ),
        ("class DenseTwin(DenseLayer)", "class DenseTwin(DenseLayer", "is no Python that can be read here, line "),
        (
            "\n# Copyright",
            "# coding: of-no-codec\n# Copyright",
            "is no Python source that can be read: unknown",
        ),
    ],
)
def test_upstream_that_can_t_be_patched_for_certain_is_refused(planted, file, capsys, old, new, words):
    planted.change(old, new)
    assert words in check(capsys)
    with pytest.raises(PatchError, match=words):
        patchgen(["patches.py"])


def test_a_property_with_a_setter_is_one_method(planted, file):
    both = "    @property\n    def two(self): ...\n\n    @two.setter\n    def two(self, x): ...\n\n"
    planted.change(FORWARD, f"{both}{FORWARD}")
    planted.patches('@config.override_method("DenseNorm.two")\ndef two(self):\n    return 2\n')
    patchgen(["patches.py"])
    assert file.read_text().count("def two(self") == 2


@pytest.mark.parametrize("signature", [b"\xef\xbb\xbf", "# coding: latin-1\n# \xe9\n".encode("latin-1")])
def test_a_source_in_another_encoding_is_read_as_python_reads_it(planted, file, capsys, signature):
    upstream = planted.folder / "planted/modeling_dense.py"
    upstream.write_bytes(signature + upstream.read_bytes())
    patchgen(["patches.py"])
    check(capsys, passes=True)


def test_what_someone_left_in_place_of_a_generated_file_is_written_anew(file, capsys):
    text, beside = file.read_text(), file.with_suffix(".diff")
    for broken in (b"# \xe9\n" + text.encode(), b"class X", b"\0", b""):
        file.write_bytes(broken)
        assert "edited by hand" in (said := check(capsys)) or "is no Python" in said or "was not written by" in said
        check(capsys, passes=True, fix=True)
        assert file.read_text() == text
    beside.write_bytes(b"\xff")
    assert "patched_dense.diff is missing or old" in check(capsys)


def test_two_configs_do_not_write_one_file(planted, file):
    again = 'other = PatchConfig(source_module="planted.modeling_dense", target_file="patched_dense.py")'
    planted.patches(f"{PATCHES}{again}\n")
    with pytest.raises(ConfigError, match="2 configs write generated.patched_dense.py: give them other names"):
        patchgen(["patches.py"])


def test_a_file_of_patches_that_is_no_python_is_named_and_others_are_checked(planted, file, capsys):
    (planted.folder / "broken.py").write_text("config = PatchConfig(\n")
    with pytest.raises(typer.Exit):
        patchgen(all_patches=True, check=True)
    said = capsys.readouterr().out
    assert "broken.py can't be imported: " in said and "patched_dense.py: up to date" in said
