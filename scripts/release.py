"""Makes a release of all distributions: versions, changelog, checks, wheels and sdists in dist/, a commit and a tag.

Nothing leaves the machine: ``git push --follow-tags`` and the upload of dist/ are for who releases. If a step fails,
the files are put back as they were.
"""

from __future__ import annotations

import argparse
import datetime
import re
import shutil
import subprocess
import sys
from pathlib import Path

from packaging.version import Version

from distributions import ROOT, SOURCES, build

_CHANGELOG, _FRAGMENTS, _DIST = "CHANGELOG.md", "changes", "dist"
_UNRELEASED = "## Unreleased\n"


class ReleaseError(Exception):
    """The release can't be made; the message says what to do."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version", help="x.y.z")
    parser.add_argument("--check", default="make check test-all", help="what must succeed before the commit")
    arguments = parser.parse_args()
    try:
        release(arguments.version, arguments.check)
    except ReleaseError as error:
        sys.exit(f"no release: {error}")


def release(version: str, check: str) -> None:
    """Make the release ``version``, or leave everything as it was."""
    before = current_version()
    refuse(version, before)
    try:
        for file, text in bumped(before, version).items():
            file.write_text(text, encoding="utf-8")
        write_changelog(version)
        if status := subprocess.run(check, shell=True, cwd=ROOT).returncode:
            raise ReleaseError(f"{check} ended with {status}; mend what it says, and commit")
        shutil.rmtree(ROOT / _DIST, ignore_errors=True)
        built = build(SOURCES, ROOT / _DIST)
        _git("add", "--update")
        _git("commit", "--quiet", "--message", f"Release {version}")
        _git("tag", "--annotate", "--message", f"Release {version}", f"v{version}")
    except BaseException:
        _git("reset", "--quiet", "--hard", "HEAD")  # the working tree was clean
        shutil.rmtree(ROOT / _DIST, ignore_errors=True)
        raise
    print(*(f"{path.relative_to(ROOT)}" for path in built), sep="\n")
    print(f"committed and tagged v{version}; publish with: git push --follow-tags, and upload dist/*")


def current_version() -> str:
    """The version that all distributions have.

    Raises:
        ReleaseError: they differ.
    """
    versions = {re.findall(r'^version = "(.*)"$', _project(source), re.MULTILINE)[0] for source in SOURCES}
    if len(versions) > 1:
        raise ReleaseError(f"the distributions have the versions {', '.join(sorted(versions))}; give them one")
    return versions.pop()


def refuse(version: str, before: str) -> None:
    """Raise ReleaseError unless ``version`` can be made from this working tree."""
    if not re.fullmatch(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)", version):
        raise ReleaseError(f"{version!r} is no version; write x.y.z, e.g. VERSION={before}")
    tags = _git("tag", "--list", "v*").split()
    # A version that was never tagged, as the first one, is there to be released.
    if f"v{version}" in tags or Version(version) < Version(before):
        raise ReleaseError(
            f"{version} is not newer than {before}, which is here; the tags are {', '.join(tags) or 'none'}"
        )
    if changed := _git("status", "--porcelain").strip():
        raise ReleaseError(f"the working tree has changes; commit or stash them:\n{changed}")


def bumped(before: str, version: str) -> dict[Path, str]:
    """The new text of each file that holds the version."""
    series = version.rpartition(".")[0]
    files = {}
    for source in SOURCES:
        text = _project(source).replace(f'\nversion = "{before}"\n', f'\nversion = "{version}"\n')
        files[source / "pyproject.toml"] = re.sub(r'"veomni-core>=[\d.]+"', f'"veomni-core>={series}"', text)
    citation = ROOT / "CITATION.cff"
    files[citation] = re.sub(r"^version: .*$", f"version: {version}", citation.read_text("utf-8"), flags=re.MULTILINE)
    return files


def write_changelog(version: str) -> None:
    """Put the fragments, and what stands under Unreleased, under the version; remove the fragments."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    draft = _run([sys.executable, "-m", "towncrier", "build", "--draft", "--version", version, "--date", today])
    _, _, fragments = draft.partition(f"## {version} ({today})")
    if not fragments:
        raise ReleaseError(f"towncrier wrote no section for {version}:\n{draft}")
    changelog = ROOT / _CHANGELOG
    head, heading, rest = changelog.read_text("utf-8").partition(_UNRELEASED)
    if not heading:
        raise ReleaseError(f"{_CHANGELOG} has no heading {_UNRELEASED.strip()!r}; put it above the newest version")
    news = fragments.strip() if any(_fragments()) else ""
    parts = [f"{head}{heading}", f"## {version} ({today})", news, rest.strip()]
    changelog.write_text("\n\n".join(part.strip() for part in parts if part.strip()) + "\n", encoding="utf-8")
    for file in _fragments():
        file.unlink()


def _fragments() -> list[Path]:
    return [file for file in sorted((ROOT / _FRAGMENTS).glob("*.md")) if file.name != "README.md"]


def _project(source: Path) -> str:
    return (source / "pyproject.toml").read_text("utf-8")


def _git(*arguments: str) -> str:
    return _run(["git", *arguments])


def _run(command: list[str]) -> str:
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if result.returncode:
        said = f"{result.stdout}\n{result.stderr}".strip()[-4000:]
        raise ReleaseError(f"{' '.join(command)} ended with {result.returncode}:\n{said}")
    return result.stdout


if __name__ == "__main__":
    main()
