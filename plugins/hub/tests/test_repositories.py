"""A repository is read from the Hub's cache, and downloaded only where the file says so. No test uses a network."""

from __future__ import annotations

import shutil

import pytest
from hub_folders import LAYER, write_package
from huggingface_hub.errors import LocalEntryNotFoundError

from veomni_conformance import check_kernel
from veomni_core.errors import KernelLoadError
from veomni_hub import located

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPOSITORY = {"folder": None, "repo": "acme/norm", "revision": COMMIT}


@pytest.fixture
def written(tmp_path):
    write_package(tmp_path / "acme-norm")
    return tmp_path / "acme-norm"


@pytest.fixture(autouse=True)
def hub_cache(tmp_path, monkeypatch):
    """An empty cache of the Hub."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.fixture
def network(monkeypatch, written):
    """Stands for the Hub: every download gives the written folder. The calls that would have reached it."""
    calls = []

    def snapshot_download(repo_id, **options):
        if options["local_files_only"]:
            raise LocalEntryNotFoundError("the network is not to be used")
        calls.append((repo_id, options))
        return str(written)

    monkeypatch.setattr(located, "snapshot_download", snapshot_download)
    return calls


def test_nothing_is_downloaded_unless_the_file_says_so(written, listed, network):
    (spec,) = listed(written, LAYER, **REPOSITORY).kernels("rms_norm")
    with pytest.raises(KernelLoadError, match=r"acme/norm at 0123456789.* is not in the Hub's cache.*download: true"):
        spec.load()
    assert network == []


def test_the_pinned_commit_is_downloaded_with_the_listed_variants_alone(written, listed, network):
    (spec,) = listed(written, LAYER, download=True, **REPOSITORY).kernels("rms_norm")
    assert network == [], "listing kernels downloads nothing"
    assert check_kernel(spec, "cpu", "float32").ok
    ((repo_id, options),) = network
    assert (repo_id, options["repo_type"], options["revision"]) == ("acme/norm", "kernel", COMMIT)
    assert options["allow_patterns"] == ["build/torch-universal/*"]


def test_what_was_downloaded_must_have_the_digest(written, listed, network):
    (spec,) = listed(written, LAYER, download=True, **REPOSITORY).kernels("rms_norm")
    code = written / "build" / "torch-universal" / "layers.py"
    code.write_text(code.read_text() + "\n")
    with pytest.raises(KernelLoadError, match="are not those that were listed"):
        spec.load()


def test_what_is_in_the_cache_already_is_read_there(written, listed, hub_cache):
    (spec,) = listed(written, LAYER, **REPOSITORY).kernels("rms_norm")
    shutil.move(written, hub_cache / "kernels--acme--norm" / "snapshots" / COMMIT)
    assert check_kernel(spec, "cpu", "float32").ok


def test_an_empty_cache_is_named(written, listed):
    (spec,) = listed(written, LAYER, **REPOSITORY).kernels("rms_norm")
    with pytest.raises(KernelLoadError, match="is not in the Hub's cache"):
        spec.load()
