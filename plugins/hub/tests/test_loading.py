"""What is loaded of a Hub kernel's folder: the files that were listed, for this machine, called as its mapping says."""

from __future__ import annotations

import os
import py_compile

import pytest
import torch
from hub_folders import FUNCTION, LAYER, RIGHT, write_package
from verified_kernels import verified

from veomni_conformance import check_kernel
from veomni_core.errors import KernelLoadError


def test_a_changed_byte_is_refused_before_anything_is_imported(right, listed, tmp_path):
    registry = listed(right, LAYER)
    verified(registry)
    (spec,) = registry.kernels("rms_norm")
    code = right / "build" / "torch-universal" / "layers.py"
    code.write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\n" + code.read_text())
    with pytest.raises(
        KernelLoadError, match=r"the files of torch-universal .* are not those that were listed: sha256:"
    ):
        spec.load()
    assert not (tmp_path / "imported").exists()


def test_bytecode_that_no_digest_covers_does_not_run(right, listed):
    registry = listed(right, LAYER)
    code = right / "build" / "torch-universal" / "layers.py"
    good, stat = code.read_text(), code.stat()
    code.write_text(good.replace(RIGHT, "0 * x.float() + eps" + " " * (len(RIGHT) - 19)))
    os.utime(code, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    py_compile.compile(str(code))
    code.write_text(good)
    os.utime(code, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    (spec,) = registry.kernels("rms_norm")
    assert check_kernel(spec, "cpu", "float32").ok


def test_a_folder_that_is_a_link_is_refused(right, listed, tmp_path):
    registry = listed(right, LAYER)
    (tmp_path / "elsewhere").mkdir()
    (right / "build" / "torch-universal" / "more").symlink_to(tmp_path / "elsewhere")
    (spec,) = registry.kernels("rms_norm")
    with pytest.raises(KernelLoadError, match="is a link to a folder"):
        spec.load()


def test_no_variant_for_this_machine_says_what_is_there_and_what_is_needed(tmp_path, listed):
    write_package(tmp_path / "acme-norm", variant="torch29-cxx11-cu128-x86_64-linux")
    (spec,) = listed(tmp_path / "acme-norm", LAYER).kernels("rms_norm")
    with pytest.raises(
        KernelLoadError,
        match=r"is for this machine \(torch29-cxx11-cu128-x86_64-linux: Torch version \(2.9\) does not match",
    ):
        spec.load()


def test_a_listed_variant_that_is_not_there_is_named_with_those_that_are(right, listed):
    registry = listed(right, LAYER)
    (right / "build" / "torch-universal").rename(right / "build" / "torch-cuda")
    (spec,) = registry.kernels("rms_norm")
    with pytest.raises(
        KernelLoadError, match="has no build/torch-universal, which this machine needs; it has torch-cuda"
    ):
        spec.load()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"name": "A"}, "is not the metadata of a kernel"),
        ({"id": None}, "is not the metadata of a kernel"),
        ({"python-depends": ["einops-of-tomorrow"]}, "einops-of-tomorrow"),
        ({"kernel-depends": [{"repo-id": "acme/other", "version": 1}]}, "loads other kernels of the Hub"),
        ({"id": "torch"}, "a module of that name is loaded already"),
    ],
    ids=["name", "id", "python-depends", "kernel-depends", "taken-id"],
)
def test_metadata_that_can_not_be_met_is_named(tmp_path, listed, change, message):
    write_package(tmp_path / "acme-norm", **change)
    (spec,) = listed(tmp_path / "acme-norm", LAYER).kernels("rms_norm")
    with pytest.raises(KernelLoadError, match=message):
        spec.load()


def test_metadata_that_is_missing_or_no_json_is_named(right, listed):
    path = right / "build" / "torch-universal" / "metadata.json"
    for broken in (lambda: path.write_text("{"), path.unlink):
        broken()
        (spec,) = listed(right, LAYER).kernels("rms_norm")
        with pytest.raises(KernelLoadError, match="metadata.json is not the metadata of a kernel"):
            spec.load()


@pytest.mark.parametrize(
    "kernel, message",
    [
        ({**LAYER, "layer": "AcmeRmsNorm"}, "has no layer 'AcmeRmsNorm'. Did you mean 'AcmeRMSNorm'?"),
        ({**LAYER, "layer": "AcmeInferenceNorm"}, "says has_backward = False"),
        ({**FUNCTION, "function": "rmsnorm"}, "has no function 'rmsnorm'. Did you mean 'rms_norm'?"),
        (
            {**FUNCTION, "call": {"x": "hidden", "weight": "weight", "eps": "eps"}},
            "'hidden', which the op doesn't have",
        ),
        ({**FUNCTION, "call": {"x": "x", "weight": "weight"}}, "call leaves out eps of the op"),
        ({**FUNCTION, "call": {"x": "x", "w": "weight", "eps": "eps"}}, "rms_norm can't be called with x, w, eps"),
    ],
    ids=["layer", "backward", "function", "argument", "left-out", "parameter"],
)
def test_a_mapping_that_does_not_fit_is_named(right, listed, kernel, message):
    (spec,) = listed(right, kernel).kernels("rms_norm")
    with pytest.raises(KernelLoadError) as error:
        spec.load()
    assert message in str(error.value)


def test_a_layer_without_a_backward_can_evaluate(right, listed):
    (spec,) = listed(right, {**LAYER, "layer": "AcmeInferenceNorm", "backward": False}).kernels("rms_norm")
    assert check_kernel(spec, "cpu", "float32").ok


@pytest.mark.parametrize("kernel", [LAYER, FUNCTION], ids=["layer", "function"])
def test_the_call_breaks_no_graph(right, listed, kernel):
    (spec,) = listed(right, kernel).kernels("rms_norm")
    norm, x, weight = spec.load(), torch.randn(4, 32), torch.randn(32)
    compiled = torch.compile(lambda x, weight: norm(x, weight, eps=1e-6), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, weight), norm(x, weight, 1e-6))


def test_a_call_with_other_arguments_raises(right, listed):
    (spec,) = listed(right, FUNCTION).kernels("rms_norm")
    with pytest.raises(TypeError, match="takes x, weight, eps, not 1 values and bias"):
        spec.load()(torch.ones(2), bias=None)
