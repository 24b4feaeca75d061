"""What differs from the lock file is refused: files before any plugin is imported, then specs; on all ranks alike."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

from distributed import run_ranks
from veomni_core.cli.frozen import frozen_as_said
from veomni_core.discovery.discover import describe, discover
from veomni_core.errors import LockFileError, LockMismatchError
from veomni_tools.locks.locked import installed, with_specs

PLUGIN = """
    import os
    import pathlib
    from veomni_core import KernelSpec, hookimpl

    VEOMNI_PLUGIN_API_VERSION = 1
    pathlib.Path(os.environ["IMPORTED"]).touch()

    def kernel(x, weight, eps):
        return x

    @hookimpl
    def veomni_kernels():
        preference = int(os.environ.get("PREFERENCE", "50"))
        factory = os.environ.get("FACTORY", "{module}:kernel")
        return [KernelSpec("here", "rms_norm", "standard", factory=factory, preference=preference)]
"""
JOB = """
model:
  config: {model_type: llama, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 4}
  ops_implementation: {preset: eager, rms_norm_implementation: torch}
"""

Write = Callable[[], dict[str, str]]


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that the plugin makes when it is imported."""
    marker = tmp_path / "imported"
    monkeypatch.setenv("IMPORTED", str(marker))
    return marker


@pytest.fixture
def plugin(install: Callable[..., str], imported: Path) -> str:
    """The module of an installed plugin."""
    return install("acme", PLUGIN)


@pytest.fixture
def lock(tmp_path: Path) -> Write:
    """Locks what is installed; gives the environment that refuses anything else, with nothing of plugins imported."""

    def write() -> dict[str, str]:
        path = tmp_path / "veomni.lock"
        path.write_text(with_specs(installed(), describe({})).to_text(), encoding="utf-8")
        for module in [name for name in sys.modules if name.startswith("acme")]:
            del sys.modules[module]
        (tmp_path / "imported").unlink(missing_ok=True)
        return {"VEOMNI_FROZEN": str(path)}

    return write


def site_packages(tmp_path: Path) -> Path:
    return tmp_path / "site-packages"


def test_the_same_installation_is_the_same_text_and_is_accepted(plugin: str, lock: Write) -> None:
    frozen = lock()
    text = Path(frozen["VEOMNI_FROZEN"]).read_text()
    assert discover(frozen).plugin("acme").healthy
    lock()
    assert Path(frozen["VEOMNI_FROZEN"]).read_text() == text


def test_a_changed_file_is_refused_before_it_is_imported(
    plugin: str, lock: Write, imported: Path, tmp_path: Path
) -> None:
    frozen = lock()
    with (site_packages(tmp_path) / f"{plugin}.py").open("a") as file:
        file.write("# another line\n")
    with pytest.raises(LockMismatchError, match=rf"acme 1\.0: 1 changed: {plugin}\.py"):
        discover(frozen)
    assert not imported.exists()
    discover({})
    assert imported.exists()  # so the plugin would have said that it was imported


def test_an_added_plugin_a_removed_one_and_another_version_are_named_together(
    plugin: str, install: Callable[..., str], lock: Write, imported: Path, tmp_path: Path
) -> None:
    install("removed", PLUGIN)
    frozen = lock()
    for info in ("acme-1.0", "removed-1.0"):
        files = site_packages(tmp_path) / f"{info}.dist-info"
        for file in files.iterdir():
            file.unlink()
        files.rmdir()
    install("newcomer", PLUGIN, version="0.1")
    info = site_packages(tmp_path) / "acme-1.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.1\n")
    (info / "entry_points.txt").write_text(f"[veomni.plugins]\nacme = {plugin}\n")
    importlib.invalidate_caches()
    with pytest.raises(LockMismatchError) as caught:
        discover(frozen)
    for change in ("removed 1.0 is not installed any more", "newcomer 0.1 was added", "acme: version 1.0 -> 1.1"):
        assert change in str(caught.value)
    assert not imported.exists()


def test_an_entry_point_that_names_another_module_is_refused(
    plugin: str, install: Callable[..., str], lock: Write, imported: Path, tmp_path: Path
) -> None:
    frozen = lock()
    points = site_packages(tmp_path) / "acme-1.0.dist-info" / "entry_points.txt"
    points.write_text(f"[veomni.plugins]\nacme = {plugin}.other\n")
    with pytest.raises(LockMismatchError, match="its plugins: 1 changed: acme"):
        discover(frozen)
    assert not imported.exists()


def test_a_folder_that_hides_the_installed_package_is_seen(
    plugin: str, lock: Write, imported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen = lock()
    other = tmp_path / "other"
    other.mkdir()
    (other / f"{plugin}.py").write_text("VEOMNI_PLUGIN_API_VERSION = 1\n")
    monkeypatch.syspath_prepend(str(other))
    with pytest.raises(LockMismatchError, match="acme 1.0: 1 changed"):
        discover(frozen)
    assert not imported.exists()


def test_another_description_by_the_same_files_is_refused(
    plugin: str, lock: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen = lock()
    monkeypatch.setenv("PREFERENCE", "70")
    with pytest.raises(LockMismatchError, match="what plugins describe differs") as caught:
        discover(frozen)
    assert "acme 1.0: plugin acme: 1 changed: kernel rms_norm/standard:here" in str(caught.value)


def test_a_changed_library_that_a_kernel_comes_from_is_refused(
    plugin: str, lock: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = site_packages(tmp_path) / "the_library.py"
    library.write_text("def kernel(x, weight, eps):\n    return x\n", encoding="utf-8")
    monkeypatch.setenv("FACTORY", "the_library:kernel")
    frozen = lock()
    discover(frozen)
    library.write_text("def kernel(x, weight, eps):\n    return 1.5 * x\n", encoding="utf-8")
    with pytest.raises(LockMismatchError, match="plugin acme: 1 changed: code the_library"):
        discover(frozen)


def test_a_plugin_that_fails_now_is_refused_and_one_that_always_failed_is_not(
    plugin: str, install: Callable[..., str], lock: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("acme-broken", "import nothing_of_this_name")
    frozen = lock()
    assert discover(frozen).plugin("acme-broken").status == "failed"
    monkeypatch.setenv("PREFERENCE", "high")
    sys.modules.pop(plugin, None)
    with pytest.raises(LockMismatchError, match="plugin acme loaded then, and fails now: ValueError"):
        discover(frozen)


def test_a_blocked_plugin_runs_no_code_so_it_may_be_blocked_later_but_not_let_in(
    plugin: str, lock: Write, tmp_path: Path
) -> None:
    frozen = lock()
    assert discover({**frozen, "VEOMNI_PLUGINS_BLOCK": "acme"}).plugin("acme").status == "blocked"
    blocked = with_specs(installed(), describe({"VEOMNI_PLUGINS_BLOCK": "acme"}))
    Path(frozen["VEOMNI_FROZEN"]).write_text(blocked.to_text(), encoding="utf-8")
    with pytest.raises(LockMismatchError, match="plugin acme did not load then, and does now"):
        discover(frozen)


def test_a_lock_that_is_missing_or_damaged_lets_nothing_in(
    plugin: str, lock: Write, imported: Path, tmp_path: Path
) -> None:
    frozen = lock()
    with pytest.raises(LockFileError, match="there is no such lock file"):
        discover({"VEOMNI_FROZEN": str(tmp_path / "nowhere.lock")})
    path = Path(frozen["VEOMNI_FROZEN"])
    path.write_text(path.read_text().replace("acme", "acne", 1))
    with pytest.raises(LockFileError, match="was damaged, edited, or merged"):
        discover(frozen)
    assert not imported.exists()


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "job.yaml").write_text(JOB, encoding="utf-8")
    return tmp_path / "job.yaml"


def test_the_command_locks_a_plan_and_refuses_another(
    plugin: str, job: Path, veomni: Callable[..., str], tmp_path: Path
) -> None:
    said = veomni("lock", "job.yaml", "--hardware", "h200", "--hardware", "cpu")
    assert "veomni.lock is written" in said and "plans: 2" in said
    assert "model.norm: torch" in (tmp_path / "veomni.lock").read_text()
    veomni("plan", "job.yaml", "--hardware", "h100", "--frozen")
    job.write_text(JOB.replace("rms_norm_implementation: torch", "rms_norm_implementation: {'*.norm': eager}"))
    said = veomni("plan", "job.yaml", "--hardware", "h100", "--frozen=veomni.lock", code=1)
    assert "torch -> eager at 5 site(s): model.layers.0.input_layernorm" in said
    assert "no longer in it: job.yaml" in veomni("lock")


def test_the_option_the_job_and_the_variable_must_name_one_file(
    plugin: str, job: Path, imported: Path, veomni: Callable[..., str], tmp_path: Path
) -> None:
    said = veomni("lock", VEOMNI_PLUGINS_BLOCK="veomni-npu")
    npu = version("veomni-npu")
    assert f"without what it describes: plugin veomni-npu of veomni-npu {npu}, which is blocked" in said
    veomni("lock")
    imported.unlink()
    (tmp_path / "acme.lock").write_text("")
    job.write_text(f"{JOB}train: {{frozen: acme.lock}}\n")
    for arguments in (["plan", "job.yaml"], ["plan", "job.yaml", "--frozen"], ["list", "--frozen=acme.lock"]):
        assert "acme.lock is no lock file" in veomni(*arguments, code=2)
    assert "different lock files are named" in veomni("plan", "job.yaml", "--frozen=veomni.lock", code=2)
    assert "different lock files" in veomni("list", "--frozen=acme.lock", code=2, VEOMNI_FROZEN="veomni.lock")
    assert "must be the path of a lock file" in veomni("plan", "job.yaml", "--set", "train.frozen=[a]", code=2)
    assert "there is no such lock file" in veomni("list", code=2, VEOMNI_FROZEN="nowhere.lock")
    assert not imported.exists()
    veomni("list", "--frozen=veomni.lock", VEOMNI_FROZEN=str(tmp_path / "veomni.lock"))
    assert imported.exists()
    assert "VEOMNI_FROZEN is set" in veomni("lock", code=2, VEOMNI_FROZEN="veomni.lock")


ON_RANKS = """
import time
from transformers import LlamaConfig, LlamaForCausalLM
from veomni_core import bind
from veomni_core.cli.frozen import frozen_as_said
from veomni_core.errors import LockMismatchError, PlanMismatchError

os.environ["IMPORTED"] = "{folder}/imported-by-" + os.environ["RANK"]
with frozen_as_said(["list", "--frozen={folder}/veomni.lock"]):
    print("both are alike")
if os.environ["RANK"] == "1":
    sys.path.insert(0, "{folder}/newer")
try:
    with frozen_as_said(["list", "--frozen={folder}/veomni.lock"]):
        print("not refused")
except LockMismatchError as error:
    print("said:", str(error).replace("\\n", " "))

os.environ["VEOMNI_FROZEN"] = "{folder}/veomni.lock"
sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, vocab_size=64)
try:
    bind(LlamaForCausalLM(LlamaConfig(**sizes)), {{"preset": "eager"}}, agreement_timeout=60.0)
except (LockMismatchError, PlanMismatchError) as error:
    print(type(error).__name__, "acme: version 1.0 -> 1.1" in str(error))
"""


@pytest.mark.thorough
def test_all_ranks_end_with_one_message_where_one_of_them_differs(
    plugin: str, lock: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{site_packages(tmp_path)}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    lock()
    info = tmp_path / "newer" / "acme-1.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.1\n")
    (info / "entry_points.txt").write_text(f"[veomni.plugins]\nacme = {plugin}\n")
    first, second = (output.splitlines() for output in run_ranks(ON_RANKS.format(folder=tmp_path)))
    assert first[:2] == second[:2]
    assert first[0] == "both are alike"
    assert first[1].startswith("said: 1 of 2 ranks are refused: rank 1: what is installed differs from")
    assert (first[2], second[2]) == ("PlanMismatchError True", "LockMismatchError True")


class NotInstalled:
    """Finds everything but veomni-tools."""

    def find_spec(self, name: str, *_: object) -> None:
        if name == "veomni_tools":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_without_what_reads_lock_files_nothing_frozen_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "veomni_tools"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [NotInstalled(), *sys.meta_path])
    job = tmp_path / "job.yaml"
    job.write_text(JOB + "train: {frozen: veomni.lock}\n")
    with pytest.raises(LockFileError, match="VEOMNI_FROZEN names a lock file, and .*pip install veomni-tools"):
        discover({"VEOMNI_FROZEN": "veomni.lock"})
    for source, words in (("--frozen", ["list", "--frozen"]), (f"train.frozen of {job}", ["plan", str(job)])):
        with pytest.raises(LockFileError, match=f"{source} names a lock file, and veomni-tools is not installed"):
            frozen_as_said(words)
    with frozen_as_said(["list"]) as words:
        assert words == ["list"]
