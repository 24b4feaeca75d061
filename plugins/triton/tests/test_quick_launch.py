"""A quick launch is Triton's own: the same kernel for the same arguments, and nothing that waits for it misses it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton
import triton.language as tl

from veomni_triton.quick_launch import quick_launch

ROOT = Path(__file__).resolve().parents[3]


@triton.jit
def _kernel(x):
    tl.store(x, 1)


@pytest.mark.skipif(not triton.__version__.startswith("3.6."), reason="another Triton launches by its own")
def test_quick_launches_are_tritons_own():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["VEOMNI_QUICK_LAUNCH"] = "1"
    script = Path(__file__).with_name("quick_launches.py")
    command = [sys.executable, str(script)]
    done = subprocess.run(
        command, env={**environment, "PYTHONPATH": str(ROOT)}, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("missing", ["_IS_ASKED", "_IS_KNOWN"])
def test_another_triton_launches_by_its_own_and_so_does_what_was_not_asked(missing, monkeypatch):
    for name in ("_IS_ASKED", "_IS_KNOWN"):
        monkeypatch.setattr(f"veomni_triton.quick_launch.{name}", name != missing)
    assert quick_launch(_kernel) is _kernel
