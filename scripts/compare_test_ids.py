"""Compares the tests of a revision with those that the test commands run now: ``compare_test_ids.py BASE``.

Each test of ``BASE`` must be in ``make test-all``. Those that are not are printed, and the exit code is 1.
``--moved`` names a file with a line ``old id -> new id`` for each test that has another name now.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def collected(folder: Path, *arguments: str) -> set[str]:
    """The ids of the tests in ``folder``, whose own sources are imported."""
    sources = [folder / "core" / "src", *sorted(folder.glob("plugins/*/src"))]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sources))}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the tests of {folder} can't be collected:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return {line for line in done.stdout.splitlines() if "::" in line}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base", help="the revision whose tests must still run")
    parser.add_argument("--moved", type=Path, help="a file with a line 'old id -> new id' for each test that moved")
    arguments = parser.parse_args()
    lines = arguments.moved.read_text(encoding="utf-8").splitlines() if arguments.moved else []
    moved = dict(line.split(" -> ") for line in lines if " -> " in line)
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder, "base")
        worktree = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*worktree, "add", "--quiet", "--detach", str(base), arguments.base], check=True)
        try:
            before = collected(base)
        finally:
            subprocess.run([*worktree, "remove", "--force", str(base)], check=True)
    now = collected(ROOT, "--suite", "all")
    lost = sorted(name for name in before if moved.get(name, name) not in now)
    print(f"{len(before)} tests at {arguments.base}, {len(now)} in make test-all; {len(lost)} are in none")
    for suite, target in (("test", "make test"), ("docs", "make test-docs")):
        print(f"{target} runs {len(collected(ROOT, '--suite', suite))}")
    print("\n".join(lost))
    return int(bool(lost))


if __name__ == "__main__":
    sys.exit(main())
