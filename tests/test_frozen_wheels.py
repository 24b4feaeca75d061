"""A lock of real wheels in an environment of their own: what changes there is refused before a plugin's code runs."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from fresh_environment import FAMILY, FreshEnvironment, build_wheel

ROOT = Path(__file__).resolve().parent.parent
PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "{version}"
dependencies = ["veomni-core"]

[project.entry-points."veomni.plugins"]
{name} = "{package}.plugin"
"""
PLUGIN = """
import os
import pathlib

from veomni_core import KernelSpec, hookimpl

VEOMNI_PLUGIN_API_VERSION = 1
pathlib.Path(os.environ["IMPORTED"]).touch()


@hookimpl
def veomni_kernels():
    return [KernelSpec("{name}", "rms_norm", "standard", factory="{package}.norm:norm")]
"""


def wheel(folder: Path, name: str, version: str = "1.0") -> Path:
    """A plugin's wheel, whose module makes a file when it is imported."""
    package = name.replace("-", "_")
    source = folder / f"{name}-{version}-source"
    (source / package).mkdir(parents=True)
    (source / "pyproject.toml").write_text(PROJECT.format(name=name, version=version, package=package))
    (source / package / "__init__.py").write_text("")
    (source / package / "plugin.py").write_text(PLUGIN.format(name=name, package=package))
    (source / package / "norm.py").write_text("def norm(x, weight, eps):\n    return x\n")
    return build_wheel(source, folder)


class Installation:
    """An environment with veomni-core and a plugin, and what its ``veomni`` says."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = FreshEnvironment(folder / "environment")
        self.plugin = wheel(folder, "acme-norm")
        wheels = [*(build_wheel(ROOT / source, folder) for source in FAMILY), self.plugin]
        self.environment.link_requirements(wheels)
        self.environment.install(*wheels)
        self.marker, self.lock = folder / "imported", folder / "veomni.lock"
        self.veomni("lock", "--output", str(self.lock))
        (self.package,) = (folder / "environment").glob("lib/*/site-packages/acme_norm")

    def veomni(self, *arguments: str) -> str:
        """What the command prints. An exit code other than 0 is a RuntimeError."""
        return self.environment.run("-m", "veomni_core.cli", *arguments, environment={"IMPORTED": str(self.marker)})

    def refused(self, *changes: str) -> None:
        """Check that ``veomni list --frozen`` ends with 1, names ``changes``, and has imported no plugin."""
        self.marker.unlink(missing_ok=True)
        with pytest.raises(RuntimeError, match="ended with 1") as caught:
            self.veomni("list", f"--frozen={self.lock}")
        assert not [change for change in changes if change not in str(caught.value)], caught.value
        assert not self.marker.exists()

    def accepted(self) -> None:
        """Check that ``veomni list --frozen`` lists the plugin, so has imported it."""
        self.marker.unlink(missing_ok=True)
        assert "acme-norm" in self.veomni("list", f"--frozen={self.lock}")
        assert self.marker.exists()


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    return Installation(tmp_path_factory.mktemp("wheels"))


@pytest.mark.thorough
def test_the_same_installation_gives_the_same_bytes(installation: Installation) -> None:
    installation.accepted()
    again = installation.folder / "again.lock"
    installation.veomni("lock", "--output", str(again))
    assert again.read_bytes() == installation.lock.read_bytes()
    assert str(installation.folder) not in again.read_text()


def changed(package: Path) -> Callable[[], object]:
    file = package / "norm.py"
    before = file.read_text()
    file.write_text(before + "# one more line\n")
    return lambda: file.write_text(before)


def added(package: Path) -> Callable[[], object]:
    (package / "more.py").write_text("")
    return (package / "more.py").unlink


def gone(package: Path) -> Callable[[], object]:
    before = (package / "norm.py").read_text()
    (package / "norm.py").unlink()
    return lambda: (package / "norm.py").write_text(before)


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (changed, "acme-norm 1.0: 1 changed: acme_norm/norm.py"),
        (added, "acme-norm 1.0: 1 added: acme_norm/more.py"),
        (gone, "acme-norm 1.0: 1 gone: acme_norm/norm.py"),
    ],
)
def test_a_file_that_differs_is_named_before_its_plugin_runs(
    installation: Installation, change: Callable[[Path], Callable[[], object]], said: str
) -> None:
    mend = change(installation.package)
    installation.refused(said)
    mend()
    installation.accepted()


def test_the_core_s_own_files_are_held_too(installation: Installation) -> None:
    file = installation.package.parent / "veomni_core" / "tables.py"
    before = file.read_text()
    file.write_text(before + "# one more line\n")
    installation.refused(f"veomni-core {metadata.version('veomni-core')}: 1 changed: veomni_core/tables.py")
    file.write_text(before)
    installation.accepted()


@pytest.mark.thorough
def test_a_plugin_that_is_added_upgraded_or_removed_is_named(installation: Installation) -> None:
    folder, environment = installation.folder, installation.environment
    environment.install(wheel(folder, "acme-other"), wheel(folder, "acme-norm", "1.1"))
    installation.refused("acme-other 1.0 was added", "acme-norm: version 1.0 -> 1.1")
    environment.uninstall("acme-other", "acme-norm")
    installation.refused("acme-norm 1.0 is not installed any more")
    environment.install(installation.plugin)
    installation.accepted()
