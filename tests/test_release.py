"""A release, made of a copy of the repository: what it changes, builds and tags, and what it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).resolve().parent.parent
NOBODY = {
    **{f"GIT_{who}_NAME": "A test" for who in ("AUTHOR", "COMMITTER")},
    **{f"GIT_{who}_EMAIL": "test@example.org" for who in ("AUTHOR", "COMMITTER")},
    **{"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull},
}
FRAGMENT = "changes/+a-test.fixed.md"


class Repository:
    """A repository with the files of this one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        listed = subprocess.run(
            ["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
        )
        for name in filter(None, listed.stdout.decode().split("\0")):
            if (ROOT / name).is_file() and not name.startswith(
                ("docs/images", "docs/benchmarks", "benchmarks/results")
            ):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes((ROOT / name).read_bytes())
        (folder / FRAGMENT).write_text("A fault that a test planted is mended.\n")
        self.git("init", "--quiet")
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", "The files")

    def git(self, *arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments],
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, **NOBODY},
        )
        return done.stdout

    def release(self, version: str, check: str = "true") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "scripts/release.py", version, "--check", check]
        return subprocess.run(command, cwd=self.folder, capture_output=True, text=True, env={**os.environ, **NOBODY})

    def refused(self, version: str, said: str, check: str = "true") -> None:
        """Check that the release is refused with ``said``, and that nothing has changed."""
        before = self.state()
        done = self.release(version, check)
        assert done.returncode == 1 and said in done.stderr, done.stdout + done.stderr
        assert before == self.state()

    def state(self) -> tuple[str, ...]:
        """The commit, the tags, what differs from the commit, and what was built."""
        built = ",".join(sorted(path.name for path in self.folder.glob("dist/*")))
        return self.git("rev-parse", "HEAD"), self.git("tag"), self.git("status", "--porcelain"), built


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path / "repository")


def test_a_release_is_bumped_checked_built_committed_and_tagged(repository: Repository) -> None:
    done = repository.release("0.2.0", "grep -q 'version = \"0.2.0\"' core/pyproject.toml")
    assert done.returncode == 0, done.stderr
    assert repository.git("describe", "--tags").strip() == "v0.2.0"
    assert repository.git("status", "--porcelain") == "" and not repository.git("ls-files", FRAGMENT)
    projects = ["core", *(f"plugins/{path.name}" for path in (ROOT / "plugins").iterdir() if path.is_dir())]
    for project in projects:
        text = (repository.folder / project / "pyproject.toml").read_text()
        assert 'version = "0.2.0"' in text and ('"veomni-core>=0.2"' in text or project == "core")
    built = sorted(path.name for path in (repository.folder / "dist").iterdir())
    assert len(built) == 2 * len(projects) and all("-0.2.0" in name for name in built)
    assert "version: 0.2.0" in (repository.folder / "CITATION.cff").read_text()
    changelog = (repository.folder / "CHANGELOG.md").read_text()
    _, _, released = changelog.partition("## Unreleased\n\n## 0.2.0 (")
    assert "\n- A fault that a test planted is mended.\n" in released and "### Fixed" in released
    assert released.index("planted") < released.index("### Core")
    repository.refused("0.2.0", "0.2.0 is not newer than 0.2.0, which is here; the tags are v0.2.0")
    repository.refused("0.1.9", "0.1.9 is not newer than 0.2.0")


def test_what_can_t_be_released_is_refused_and_everything_stays(repository: Repository) -> None:
    repository.refused("0.2", "'0.2' is no version; write x.y.z")
    repository.refused("0.2.0", "false ended with 1", check="false")
    (repository.folder / "core" / "README.md").write_text("")
    repository.refused("0.2.0", "the working tree has changes; commit or stash them:\nM core/README.md")


def test_distributions_with_two_versions_are_refused(repository: Repository) -> None:
    project = repository.folder / "core" / "pyproject.toml"
    project.write_text(project.read_text().replace('\nversion = "', '\nversion = "9'))
    repository.git("commit", "--quiet", "--all", "--message", "Another version")
    repository.refused("0.2.0", "the distributions have the versions ")
