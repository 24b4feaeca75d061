"""Every call of QuACK, compiled by QuACK itself for SM90: an argument it doesn't know fails here, without a GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(importlib.util.find_spec("quack") is None, reason="quack-kernels is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the other tests run the kernels themselves"),
]


def test_every_call_compiles_for_hopper():
    script = Path(__file__).with_name("compile_ahead.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count(" s\n") > 30, run.stdout
