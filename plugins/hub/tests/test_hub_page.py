"""What the how-to of Hub kernels shows is run: its folder, its file, its commands and its job."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from veomni_core.cli.app import build_app
from veomni_hub.build_variants import digest_of
from veomni_hub.kernel_file import read

pytestmark = pytest.mark.docs

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "how-to" / "hub-kernels.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The page's folder, in the working directory."""
    build = tmp_path / "acme-norm" / "build" / "torch-universal"
    build.mkdir(parents=True)
    (build / "__init__.py").write_text("from . import layers\n")
    (build / "layers.py").write_text(*blocks("python"))
    (build / "metadata.json").write_text(*blocks("json"))
    monkeypatch.chdir(tmp_path)
    return build


def test_the_page_leads_from_a_folder_to_a_plan(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub_yaml, job, from_the_hub = blocks("yaml")
    digest = digest_of(folder)
    Path("hub.yaml").write_text(hub_yaml.replace("sha256:DIGEST", digest))
    Path("job.yaml").write_text(job)
    lines = [line.removeprefix("$ ") for block in blocks("console") for line in block.splitlines()]
    outputs = {}
    for line in [*lines, "veomni plan job.yaml"]:
        verb, *words = line.split()
        if verb == "export":
            monkeypatch.setenv(*words[0].split("="))
            continue
        result = CliRunner().invoke(build_app(), words, env={"COLUMNS": "200"})
        assert result.exit_code == 0, result.output
        outputs[words[0]] = result.output
    assert digest in outputs["hub"] and "yes, the best" in outputs["hub"]
    assert outputs["verify"].count(" ok ") == 3
    assert re.search(r"rms_norm_implementation \W+ acme_norm .*as asked", outputs["plan"])

    Path("hub.yaml").write_text(from_the_hub.replace("sha256:DIGEST", digest))
    (kernel,) = read(Path("hub.yaml"))
    assert kernel.package.download and kernel.digest == read(Path("hub.yaml"))[0].digest


def test_the_page_s_tables_have_every_key_of_the_file() -> None:
    from veomni_hub.kernel_file import _HARDWARE_KEYS, _KERNEL_KEYS, _PACKAGE_KEYS

    written = set(re.findall(r"`(\w+)`", PAGE[PAGE.index("## The file's keys") :]))
    assert {*_PACKAGE_KEYS, *_KERNEL_KEYS, *_HARDWARE_KEYS} <= written


def test_the_command_names_what_is_wrong_with_a_folder(tmp_path: Path) -> None:
    result = CliRunner().invoke(build_app(), ["hub", str(tmp_path)])
    assert result.exit_code != 0 and "has no build/ with build variants in it" in str(result.exception or result.output)


def test_a_variant_of_another_machine_is_told_apart(folder: Path) -> None:
    folder.rename(folder.with_name("torch29-cxx11-cu128-x86_64-linux"))
    (folder.parent / "rubbish").mkdir()
    output = CliRunner().invoke(build_app(), ["hub", "acme-norm"], env={"COLUMNS": "250"}).output
    assert "no: Torch version (2.9) does not match" in output and "is not a build variant's name" in output
