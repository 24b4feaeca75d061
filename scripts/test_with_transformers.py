"""Runs the binding tests against another version of transformers: ``test_with_transformers.py 5.2.0``.

The version is installed beside the running environment.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from packaging.version import Version

from installed_beside import environment_with, installed_beside

ROOT = Path(__file__).resolve().parent.parent
TESTS = (
    "core/tests/test_binding.py",
    "core/tests/test_bound_models.py",
    "plugins/transformers/tests/test_find_sites.py",
    "plugins/transformers/tests/test_losses.py",
    "core/tests/test_receipt.py",
    "plugins/transformers/tests/test_norm_lookalikes.py",
    "plugins/transformers/tests/test_mlp_lookalikes.py",
    "plugins/transformers/tests/test_rotary_lookalikes.py",
    "plugins/transformers/tests/test_declared_slots.py",
    "core/tests/test_living_with_others.py",
    "plugins/transformers/tests/test_rotary.py",
    "tests/test_other_versions.py",
    "tests/test_patched_models.py",
    "tests/test_veomnis_patches.py",
)


def main() -> int:
    (version,) = sys.argv[1:]
    # With the `kernels` of its time, which hides a newer one that it can't be imported beside. From 5.24 on the extra
    # asks for a version of it that is not published yet.
    extra = "[kernels]" if Version(version) < Version("5.24") else ""
    folder = installed_beside(f"transformers{extra}=={version}")
    environment = environment_with(folder, TESTED_TRANSFORMERS=version)
    command = [sys.executable, "-m", "pytest", "-n", "auto", "--dist", "worksteal", "-p", "no:cacheprovider", *TESTS]
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
