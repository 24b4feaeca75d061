"""The kernel file is read without importing a kernel, and refused with every problem that it has."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hub_folders import LAYER, write_file, write_package

from veomni_core import bind, discover
from veomni_core.errors import ConfigError, UnknownNameError
from veomni_hub.kernel_file import VARIABLE, listed, read

DIGEST = f"sha256:{'0' * 64}"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def problems(tmp_path, **entry):
    """What is wrong with a file whose one package has these keys, beside right ones."""
    (tmp_path / "acme-norm" / "build").mkdir(parents=True, exist_ok=True)
    right = {"variants": {"torch-universal": DIGEST}, **entry}
    path = write_file(tmp_path / "hub.yaml", tmp_path / "acme-norm", LAYER, **right)
    with pytest.raises(ConfigError) as error:
        read(path)
    return str(error.value)


def test_without_the_variable_there_are_no_kernels(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert listed() == ()


def test_a_folder_is_looked_up_beside_the_file(tmp_path):
    write_package(tmp_path / "acme-norm")
    (kernel,) = read(write_file(tmp_path / "hub.yaml", tmp_path / "acme-norm", LAYER))
    assert kernel.package.folder == tmp_path / "acme-norm"
    assert (kernel.spec.name, kernel.spec.preference, kernel.spec.backward) == ("acme", 0, True)


@pytest.mark.parametrize(
    "entry, message",
    [
        ({"folder": None}, "acme needs folder (which holds build/), or repo and revision: one of the two"),
        ({"repo": "acme/norm", "revision": COMMIT}, "one of the two"),
        ({"folder": None, "repo": "acme/norm"}, "acme.revision must be a commit of 40 hexadecimal digits"),
        ({"folder": None, "repo": "acme/norm", "revision": "main"}, "since branches and tags can move"),
        ({"download": True}, "revision and download are for a repo, and this is a folder"),
        ({"download": "yes"}, "acme.download must be true or false"),
        ({"variants": {}}, "`veomni hub FOLDER` prints them"),
        ({"variants": {"torch-universal": "abc"}}, "acme.variants.torch-universal must read sha256: and 64"),
        ({"kernels": []}, "acme.kernels must be a list of kernels"),
        ({"kernels": ["norm"]}, "acme.kernels[0] must be a mapping"),
        ({"digest": DIGEST}, "acme.digest: there is no such key"),
        ({"kernels": [{**LAYER, "laier": "x"}]}, "Did you mean 'layer'?"),
        ({"kernels": [{**LAYER, "op": 3}]}, "acme.kernels[0].op must be text, not 3"),
        ({"kernels": [{**LAYER, "op": ""}]}, "acme.kernels[0] needs op and variant"),
        ({"kernels": [{**LAYER, "function": "f"}]}, "acme.kernels[0] needs layer"),
        ({"kernels": [{**LAYER, "call": {"x": 3}}]}, "to an argument of the op, or to {value: ...} for a constant"),
        (
            {"kernels": [{**LAYER, "layer": "", "function": "f"}]},
            "a function has no self; only a layer reads attributes",
        ),
        ({"kernels": [{**LAYER, "dtypes": ["float64"]}]}, "dtypes holds 'float64', which no op takes"),
        ({"kernels": [{**LAYER, "hardware": {"device": "cuda"}}]}, "acme.kernels[0].hardware.device: there is no such"),
        ({"kernels": [{**LAYER, "hardware": {"packages": ["??"]}}]}, "is not a package requirement"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_is_named(tmp_path, entry, message):
    assert message in problems(tmp_path, **entry)


def test_all_problems_come_in_one_message(tmp_path):
    message = problems(tmp_path, folder=None, variants=None, kernels=[{**LAYER, "op": 3}, {**LAYER, "call": None}])
    for each in ("needs folder", "acme.variants must map", "kernels[0].op must be text", "kernels[1].call must map"):
        assert each in message


def test_a_file_that_is_wrong_fails_the_plugin_and_a_job_that_names_its_kernel_says_so(tmp_path, monkeypatch):
    (tmp_path / "hub.yaml").write_text("acme: 3")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "hub.yaml"))
    registry = discover({"VEOMNI_PLUGINS": "veomni-hub"})
    record = registry.plugin("veomni-hub")
    assert (record.status, f"{tmp_path / 'hub.yaml'} ({VARIABLE}): acme must be a mapping" in record.problem) == (
        "failed",
        True,
    )
    with pytest.raises(UnknownNameError, match=r"'acme' is unknown.*veomni-hub.*failed to load: .*must be a mapping"):
        import torch

        bind(torch.nn.Linear(2, 2), {"preset": "eager", "rms_norm_implementation": "acme"}, registry=registry)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"absent.yaml: there is no such file"):
        read(tmp_path / "absent.yaml")


def test_describing_the_kernels_imports_no_library(tmp_path):
    write_package(tmp_path / "acme-norm")
    path = write_file(tmp_path / "hub.yaml", tmp_path / "acme-norm", LAYER)
    code = """
import sys
from veomni_hub.plugin import veomni_kernels
assert [str(spec) for spec in veomni_kernels()] == ["rms_norm/standard:acme"]
assert not {"torch", "kernels", "huggingface_hub"} & {*sys.modules}
"""
    import os

    subprocess.run([sys.executable, "-c", code], env={**os.environ, VARIABLE: str(path)}, check=True)
