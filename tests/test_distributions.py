"""What would be published: the same bytes from every build, complete metadata, and sdists whose tests run alone."""

from __future__ import annotations

import hashlib
import tarfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path
from zipfile import ZipFile

import pytest

from distributions import ROOT, SOURCES, build, copied
from fresh_environment import FreshEnvironment, with_own_requirements

# The tests that need nothing but what an sdist has; some others read the repository's pages.
TESTS_ALONE = {"veomni_torch": "tests/test_alignment.py", "veomni_quack": "tests/test_planning.py"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return build(SOURCES, tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="module")
def wheels(built: list[Path]) -> list[Path]:
    return [path for path in built if path.suffix == ".whl"]


@pytest.fixture(scope="module")
def sdists(built: list[Path]) -> list[Path]:
    return [path for path in built if path.suffix == ".gz"]


def hashes(files: list[Path]) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def metadata(wheel: Path) -> Message:
    files = ZipFile(wheel)
    (name,) = (name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
    return message_from_bytes(files.read(name))


def test_two_builds_have_the_same_bytes(built: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(built) == 2 * len(SOURCES)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1000000000")  # a machine's own, which must not count
    assert hashes(build(copied(tmp_path / "copy"), tmp_path / "again")) == hashes(built)


def test_another_source_is_another_wheel(built: list[Path], tmp_path: Path) -> None:
    copy = copied(tmp_path / "copy")[-1]
    next(copy.glob("src/*/__init__.py")).write_text('"""Another."""\n')
    again = hashes(build([copy], tmp_path / "again"))
    assert len(again) == 2 and not {*again.values()} & {*hashes(built).values()}


def test_metadata_is_complete(wheels: list[Path]) -> None:
    assert len({metadata(wheel)["Version"] for wheel in wheels}) == 1, "all distributions have one version"
    for wheel in wheels:
        said = metadata(wheel)
        assert said["Name"].startswith("veomni-") and said["Author"] and said["Keywords"]
        assert 20 < len(said["Summary"]) <= 120, said["Summary"]
        assert said["License-Expression"] == "Apache-2.0" and said.get_all("License-File") == ["LICENSE"]
        assert said["Requires-Python"] == ">=3.11"
        assert said["Description-Content-Type"] == "text/markdown"
        assert str(said.get_payload()).startswith(f"# {said['Name']}")
        assert {"Typing :: Typed", "Programming Language :: Python :: 3.11"} <= {*said.get_all("Classifier")}
        others = [text for text in said.get_all("Requires-Dist") if text.startswith("veomni-")]
        assert all(">=" in text for text in others) and bool(others) == (said["Name"] != "veomni-core")


def test_wheels_hold_the_package_with_its_types_and_its_licence(wheels: list[Path]) -> None:
    for wheel in wheels:
        names = ZipFile(wheel).namelist()
        tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
        (package,) = tops
        assert f"{package}/py.typed" in names
        assert [name for name in names if name.endswith(".dist-info/licenses/LICENSE")]
        assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]


def test_sdists_hold_the_sources_and_the_tests(sdists: list[Path]) -> None:
    for sdist in sdists:
        with tarfile.open(sdist) as files:
            names = {name.partition("/")[2] for name in files.getnames()}
        assert {"PKG-INFO", "pyproject.toml", "README.md", "LICENSE", "conftest.py", "pytest.ini"} <= names
        assert [name for name in names if name.startswith("tests/test_")]
        assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]


@pytest.mark.thorough
def test_the_tests_of_an_sdist_run_alone(wheels: list[Path], sdists: list[Path], tmp_path: Path) -> None:
    (checks,) = (wheel for wheel in wheels if wheel.name.startswith("veomni_conformance-"))
    for name, tests in TESTS_ALONE.items():
        (wheel,) = (wheel for wheel in wheels if wheel.name.startswith(f"{name}-"))
        (sdist,) = (sdist for sdist in sdists if sdist.name.startswith(f"{name}-"))
        environment = FreshEnvironment(tmp_path / name)
        needed = {*with_own_requirements(wheel, wheels), *with_own_requirements(checks, wheels)}
        environment.link_requirements(needed, also=("pytest", "hypothesis"))
        environment.install(*needed)
        with tarfile.open(sdist) as files:
            files.extractall(tmp_path / "unpacked", filter="data")
        (folder,) = (tmp_path / "unpacked").glob(f"{name}-*")
        said = environment.run(
            "-m", "pytest", "-q", f"--rootdir={folder}", "-c", f"{folder}/pytest.ini", f"{folder}/{tests}"
        )
        assert " passed" in said and str(ROOT) not in said
