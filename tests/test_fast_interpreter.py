"""Triton's interpreter is quickened in this repository's tests alone: what authors install only mends it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the kernels themselves")
MENDED = """
import sys
import pytest
from veomni_conformance.triton_interpreter import interpret_triton
interpret_triton()
code = pytest.main(["--noconftest", "-q", "-p", "no:cacheprovider", "plugins/triton/tests/test_triton_interpreter.py"])
sys.exit(code or "fast_interpreter" in sys.modules)
"""


def run(*command):
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "TRITON_INTERPRET"))}
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=clean, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.thorough
def test_the_mended_interpreter_needs_no_speed_ups():
    assert " passed" in run("-c", MENDED)


@pytest.mark.thorough
def test_a_kernel_is_checked_in_the_interpreter_that_authors_have():
    alone = ("--noconftest", "-p", "no:cacheprovider")
    plugin = ("--veomni-plugin", "veomni-triton", "--veomni-triton-interpreter")
    text = run("-m", "pytest", *alone, *plugin, "-k", "swiglu_mlp/standard and float32")
    assert "1 passed" in text
