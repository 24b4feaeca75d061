"""How two revisions are run: the base's files, processes in turns, packages of one folder, and nothing left behind."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys

import pytest

from bench_repositories import KERNEL, ROOT


def test_a_shallow_clone_is_told_to_fetch(repository, revisions, tmp_path_factory):
    repository.kernel()
    repository.commit()
    repository.commit()
    clone = tmp_path_factory.mktemp("clone")
    repository.git("clone", "--quiet", "--depth", "1", repository.folder.as_uri(), str(clone))
    module = revisions("revision")
    with pytest.raises(module.NoSuchRevision, match="git fetch --unshallow"):
        module.commit_of(clone, "HEAD~1")


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_the_base_s_files_are_removed_however_it_ends(repository, revisions, error):
    repository.kernel()
    repository.commit()
    module = revisions("revision")
    with (
        pytest.raises(error),
        module.checked_out(repository.folder, module.commit_of(repository.folder, "HEAD")) as files,
    ):
        assert (files / KERNEL).is_file()
        raise error
    assert not files.exists()


STARTS = """
import sys
from pathlib import Path
from benchmarks.revisions.compare_revisions import main, unwind_on_sigterm
from benchmarks.revisions.selection import Guarded

unwind_on_sigterm()
main(["HEAD", "--devices", "cpu", "--only", "kda"], Path(sys.argv[1]), (Guarded("kda/kda.py", "cpu", ("stub",)),))
"""


def test_a_stop_by_sigterm_leaves_neither_files_nor_processes(repository, tmp_path_factory):
    folder, fifo = tmp_path_factory.mktemp("temporary"), tmp_path_factory.mktemp("said") / "fifo"
    os.mkfifo(fifo)
    says = f"pathlib.Path({str(fifo)!r}).write_text(str(os.getpid()))"
    repository.write(KERNEL, f"import os, pathlib, signal\n{says}\nsignal.pause()\n")
    repository.commit()
    environment = {**os.environ, "TMPDIR": str(folder)}
    process = subprocess.Popen([sys.executable, "-c", STARTS, str(repository.folder)], cwd=ROOT, env=environment)
    measuring = int(fifo.read_text())  # waits until the kernel is imported
    assert list(folder.iterdir())
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 1
    assert not list(folder.iterdir())
    with pytest.raises(ProcessLookupError):
        os.kill(measuring, 0)


def test_processes_take_turns(revisions):
    said = []

    def process(which):
        return lambda asked: said.append(which) or {key: {} for key in asked}

    found = revisions("turns").in_turns(process("base"), process("head"), ["kda", "linear"], 4)
    assert said == ["base", "head", "head", "base"] * 2
    assert [(len(runs.base), len(runs.head)) for runs in found.values()] == [(4, 4)] * 2


def test_what_fails_is_not_measured_again_and_others_are(revisions):
    turns, asked = revisions("turns"), []

    def head(those):
        asked.append([*those])
        return {each: turns.NotMeasured("broken") if each == "kda" else {} for each in those}

    found = turns.in_turns(lambda those: {key: {} for key in those}, head, ["kda", "linear"], 2)
    assert found["kda"] == "broken" and len(found["linear"].base) == len(found["linear"].head) == 2
    assert asked == [["kda", "linear"], ["linear"]]


def test_packages_of_another_folder_are_refused(revisions, tmp_path):
    import veomni_core  # noqa: F401  what is loaded here

    one_process = importlib.import_module("benchmarks.shared.one_process")
    one_process.refuse_others(ROOT)
    with pytest.raises(one_process.Lacking, match="No package named 'veomni_"):
        one_process.refuse_others(tmp_path)
    for name in {name for name in sys.modules if name.startswith("veomni_") and "." not in name}:
        (tmp_path / "core/src" / name).mkdir(parents=True)
    with pytest.raises(SystemExit, match=r"was imported from .*, and not from"):
        one_process.refuse_others(tmp_path)
