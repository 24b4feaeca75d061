"""The files of a revision, and what has changed since."""

from __future__ import annotations

import io
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class NoSuchRevision(Exception):
    """The repository can't give the revision; the message says what to do."""


def commit_of(repository: Path, revision: str) -> str:
    """The commit that ``revision`` names.

    Raises:
        NoSuchRevision: there is none here.
    """
    found = _git(repository, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    if found.returncode:
        shallow = _git(repository, "rev-parse", "--is-shallow-repository").stdout.strip() == b"true"
        todo = "fetch more of its history: git fetch --unshallow" if shallow else "name a commit, a branch or a tag"
        kind = "a shallow clone" if shallow else "a git repository" if (repository / ".git").exists() else "no clone"
        raise NoSuchRevision(f"BASE={revision} names no commit here. {repository} is {kind}; {todo}")
    return found.stdout.decode().strip()


@contextmanager
def checked_out(repository: Path, commit: str) -> Iterator[Path]:
    """The files of ``commit`` in a temporary folder, which is removed however the block ends.

    An archive and no worktree: git keeps no record of it, so that nothing is left to prune.
    """
    with tempfile.TemporaryDirectory(prefix="veomni-base-") as folder:
        archive = _git(repository, "archive", "--format=tar", commit)
        archive.check_returncode()
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
            files.extractall(folder, filter="data")
        yield Path(folder)


def changed_since(repository: Path, commit: str) -> list[str]:
    """The paths that differ between ``commit`` and the working tree, new and removed files among them."""
    listings = (
        ("diff", "--name-only", "--no-renames", "-z", commit, "--"),
        ("ls-files", "--others", "--exclude-standard", "-z"),
    )
    paths: set[str] = set()
    for arguments in listings:
        listing = _git(repository, *arguments)
        listing.check_returncode()
        paths |= {path for path in listing.stdout.decode().split("\0") if path}
    return sorted(paths)


def _git(repository: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", "-C", str(repository), *arguments], stdout=subprocess.PIPE)
