"""Runs the binding tests against another version of transformers: ``test_with_transformers.py 5.2.0``.

The version is installed beside the running environment, in a folder of its own that is kept for the next time.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = (
    "core/tests/test_binding.py",
    "core/tests/test_bound_models.py",
    "core/tests/test_find_sites.py",
    "core/tests/test_losses.py",
    "core/tests/test_receipt.py",
    "core/tests/test_norm_lookalikes.py",
    "core/tests/test_mlp_lookalikes.py",
    "core/tests/test_rotary_lookalikes.py",
    "core/tests/test_declared_slots.py",
    "core/tests/test_living_with_others.py",
    "core/tests/test_rotary.py",
    "tests/test_other_versions.py",
)


def installed(version: str) -> Path:
    """The folder that holds this version of transformers and what it needs."""
    folder = Path(sys.prefix) / f"transformers-{version}"
    done = folder / ".installed"
    if not done.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--upgrade"]
        # With the `kernels` of its time, which hides a newer one that it can't be imported beside.
        subprocess.run([*pip, "--target", str(folder), f"transformers[kernels]=={version}"], check=True)
        done.touch()
    return folder


def main() -> int:
    (version,) = sys.argv[1:]
    environment = {**os.environ, "PYTHONPATH": str(installed(version)), "TESTED_TRANSFORMERS": version}
    command = [sys.executable, "-m", "pytest", "-n", "auto", "--dist", "worksteal", "-p", "no:cacheprovider", *TESTS]
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
