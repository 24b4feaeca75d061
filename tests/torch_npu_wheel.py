"""The wheel of torch-npu, unpacked once below the environment that runs the tests: the operators it registers."""

from __future__ import annotations

import functools
import mmap
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

VERSION = "2.13.0"
_FOLDER = Path(sys.prefix) / f"torch-npu-{VERSION}"
# The schemas that the library hands to TORCH_LIBRARY are C strings of its shared object.
_REGISTERED = re.compile(rb"\x00(npu_[a-z0-9_]+(?:\.[A-Za-z]+)?\([^\x00]*\) -> [^\x00]+)(?=\x00)")
_DECLARED = re.compile(r"^(?:- | )+func: (npu_\S+\(.*)$", re.MULTILINE)
# Words of pip's where it got no answer; it says so only when it tries again.
_NO_ANSWER = ("onnection", "timed out", "resolution", "Retrying", "ProxyError", "SSLError")


@functools.cache
def unpacked() -> Path:
    """The folder with the library's Python and shared objects, for Linux and Python 3.11; skips where offline."""
    if not _FOLDER.exists():
        with tempfile.TemporaryDirectory(dir=sys.prefix) as scratch:
            folder = Path(scratch) / "unpacked"
            with zipfile.ZipFile(_download(Path(scratch))) as wheel:
                wheel.extractall(folder, (name for name in wheel.namelist() if "/include/" not in name))
            try:
                folder.rename(_FOLDER)
            except OSError:  # another process has unpacked it meanwhile
                if not _FOLDER.exists():
                    raise
    return _FOLDER


def _download(folder: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        f"torch-npu=={VERSION}",
        "--no-deps",
        "--quiet",
        "--retries",
        "2",
    ]
    platform = ["--only-binary", ":all:", "--python-version", "3.11", "--platform", "manylinux_2_28_x86_64"]
    done = subprocess.run([*command, *platform, "--dest", str(folder)], capture_output=True, text=True)
    if done.returncode and any(word in done.stderr for word in _NO_ANSWER):
        pytest.skip("the package registry can't be reached, and torch-npu's wheel is not here")
    assert done.returncode == 0, done.stderr
    return next(folder.glob("*.whl"))


@functools.cache
def registered_schemas() -> dict[str, str]:
    """Every operator's whole schema by its name, as the shared object registers it."""
    with (unpacked() / "torch_npu/lib/libtorch_npu.so").open("rb") as file:
        found = _REGISTERED.findall(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    return {schema.partition("(")[0]: schema for schema in (match.decode() for match in found)}


@functools.cache
def declared_schemas() -> dict[str, str]:
    """Every operator's whole schema by its name, as the yaml declares it for the code generator.

    The generator renames ``self`` to ``input`` in what it registers, so that it can be passed by keyword.
    """
    text = (unpacked() / "torch_npu/csrc/aten/npu_native_functions_by_codegen.yaml").read_text()
    schemas = (schema.replace("Tensor self", "Tensor input") for schema in _DECLARED.findall(text))
    return {schema.partition("(")[0]: schema for schema in schemas}


def documentation(name: str) -> str:
    """What the library says of the operator ``name``, in its own language."""
    text = (unpacked() / "torch_npu/_op_plugin_docs.py").read_text()
    found = re.search(rf'_add_torch_npu_docstr\(\s*"{name}",\s*"""(.*?)"""', text, re.DOTALL)
    assert found, name
    return found[1]


@functools.cache
def meta_registrations() -> str:
    """The source of the functions that give the shapes and dtypes of results."""
    return (unpacked() / "torch_npu/op_plugin/meta/_meta_registrations.py").read_text()
