"""Which files of a distribution are hashed: those that an import would find, and no other."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import Distribution, PathDistribution
from pathlib import Path

import pytest

from veomni_conformance.installed_files import combined, hashed_files
from veomni_core.errors import HostError

Lay = Callable[..., Distribution]


@pytest.fixture
def lay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lay]:
    """Lays out a distribution with files of these contents, of which RECORD lists those that ``recorded`` names."""
    site = tmp_path / "env" / "lib" / "site-packages"
    site.mkdir(parents=True)
    monkeypatch.syspath_prepend(str(site))

    def lay(files: Mapping[str, str], recorded: list[str] | None = None, **metadata: str) -> Distribution:
        info = site / "acme-1.0.dist-info"
        files = {
            **files,
            f"{info.name}/METADATA": "Name: acme\nVersion: 1.0\n",
            **{f"{info.name}/{name}": text for name, text in metadata.items()},
        }
        for name, text in files.items():
            path = site / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        listed = [*files] if recorded is None else recorded
        (info / "RECORD").write_text("".join(f"{name},,\n" for name in listed))
        importlib.invalidate_caches()
        return PathDistribution(info)

    yield lay
    importlib.invalidate_caches()


def test_a_wheel_s_packages_modules_and_data_are_hashed_and_what_an_installer_writes_is_not(lay: Lay) -> None:
    wheel = lay(
        {
            "acme_a/__init__.py": "",
            "acme_a/inner/code.py": "x = 1",
            "acme_a/table.json": "{}",
            "acme_a/__pycache__/__init__.cpython-311.pyc": "",
            "acme_a/.mypy_cache/x.json": "",
            "acme_single.py": "y = 1",
            "acme_start.pth": "import acme_single",
            "acme_space/part/__init__.py": "",
            "../../share/acme/data.txt": "text",
            "../../bin/acme": "#!/somewhere/python",
        },
        INSTALLER="pip",
    )
    assert [*hashed_files(wheel)] == [
        "../../share/acme/data.txt",
        "acme_a/__init__.py",
        "acme_a/inner/code.py",
        "acme_a/table.json",
        "acme_single.py",
        "acme_space/part/__init__.py",
        "acme_start.pth",
    ]


def test_a_file_beside_the_recorded_ones_is_there_and_a_missing_one_is_not(lay: Lay, tmp_path: Path) -> None:
    files = {"acme_b/__init__.py": "", "acme_b/new.py": "", "acme_b/old.pyc": ""}
    wheel = lay(files, recorded=["acme_b/__init__.py", "acme_b/gone.py"])
    assert [*hashed_files(wheel)] == [*files]  # bytecode without a source is imported, so it counts


def test_an_editable_install_is_hashed_where_its_sources_are(lay: Lay, tmp_path: Path) -> None:
    sources = tmp_path / "project" / "src"
    (sources / "acme_c").mkdir(parents=True)
    (sources / "acme_c" / "__init__.py").write_text("x = 1")
    (sources / "acme_c" / "plugin.py").write_text("")
    (sources / "acme_c_module.py").write_text("")
    (sources / "notes").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(sources))
        origin = json.dumps({"url": "file:///anywhere", "dir_info": {"editable": True}})
        editable = lay({"_acme.pth": f"{sources}\nimport os\n"}, **{"direct_url.json": origin})
        hashes = hashed_files(editable, ["acme_c.plugin"])
    assert [*hashes] == ["acme_c/__init__.py", "acme_c/plugin.py", "acme_c_module.py"]
    wheel = lay(
        {"acme_c/__init__.py": "x = 1", "acme_c/plugin.py": "", "acme_c_module.py": ""}, **{"direct_url.json": ""}
    )
    importlib.invalidate_caches()
    assert hashed_files(wheel) == hashes  # so the same code is the same lock, however it is installed


def test_without_a_record_the_entry_point_s_package_is_known(lay: Lay) -> None:
    files = {"acme_d_space/part/__init__.py": "", "acme_d_space/part/plugin.py": "", "acme_d_space/other.py": ""}
    wheel = lay(files, recorded=[])
    assert [*hashed_files(wheel, ["acme_d_space.part.plugin"])] == [*files][:2]
    assert hashed_files(wheel, ["acme_d_nothing.of_this_name"]) == {}


def test_a_link_to_a_folder_is_followed_and_one_to_its_parent_is_not(lay: Lay, tmp_path: Path) -> None:
    wheel = lay({"acme_e/__init__.py": ""})
    package = Path(str(wheel.locate_file("acme_e")))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "code.py").write_text("")
    (package / "linked").symlink_to(tmp_path / "elsewhere")
    (package / "back").symlink_to(package)
    (package / "nowhere.py").symlink_to(tmp_path / "not there")
    assert [*hashed_files(wheel)] == ["acme_e/__init__.py", "acme_e/linked/code.py"]


def test_a_file_that_cannot_be_read_is_an_error(lay: Lay, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = lay({"acme_f/__init__.py": ""})

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("no")

    monkeypatch.setattr("hashlib.file_digest", refuse)
    with pytest.raises(HostError, match=r"acme_f/__init__\.py is installed, but can't be read \(no\)"):
        hashed_files(wheel)


def test_the_hash_of_all_depends_on_names_and_contents() -> None:
    one = {"a": "1", "b": "2"}
    assert combined(one) == combined({"b": "2", "a": "1"})
    assert len({combined(each) for each in (one, {"a": "2", "b": "1"}, {"a": "1"}, {"ab": "12"}, {})}) == 5
