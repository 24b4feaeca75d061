"""The processes of ``veomni verify``: each check is a fork, which ends with all that it started."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from forked_workers import ForkedWorker
from veomni_conformance.cli import verify_processes, verify_worker
from veomni_conformance.cli.verify_processes import CONTRACT, FAILED, OK, Checks, Row, joined
from veomni_core.discovery.discover import discover

PLUGIN = """
    import os, subprocess, sys, time
    from veomni_core import KernelSpec, hookimpl
    VEOMNI_PLUGIN_API_VERSION = 1

    def note(name):
        open("{folder}/" + name + f" {os.getpid()}", "w").close()

    def patches(x, weight, eps):
        import torch
        torch.patched_by_a_kernel = True
        from veomni_ops import rms_norm
        return rms_norm.offset(x, weight, eps)

    def finds(x, weight, eps):
        import torch
        assert not hasattr(torch, "patched_by_a_kernel")
        from veomni_ops import rms_norm
        return rms_norm.offset(x, weight, eps)

    def starts(x, weight, eps):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        open("{folder}/" + str(child.pid), "w").close()
        time.sleep(600)

    def kills(x, weight, eps):
        os.kill(os.getppid(), 9)
        time.sleep(600)

    @hookimpl
    def veomni_kernels():
        names = ("patches", "finds", "starts", "kills")
        return [KernelSpec(each, "rms_norm", "offset", "{module}:" + each, dtypes=("float32",)) for each in names]
"""


@pytest.fixture
def check(install, tmp_path, monkeypatch):
    """Checks one of the plugin's kernels, in the worker that checked the one before."""
    monkeypatch.setattr(verify_processes, "_Worker", ForkedWorker)
    install("forked-plugin", PLUGIN.replace("{folder}", str(tmp_path)))
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(tmp_path / "site-packages"), os.environ.get("PYTHONPATH", "")])
    )
    specs = {spec.name: spec for spec in discover().plugin("forked-plugin").kernels}
    with Checks.running(1) as checks:

        def run(name, timeout=120.0):
            (row,) = checks.rows("forked-plugin", specs[name], "cpu", ("float32",), timeout)
            return row

        yield run


def _is_there(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _gone(process: int) -> bool:
    ends = time.monotonic() + 10
    while _is_there(process) and time.monotonic() < ends:
        time.sleep(0.05)
    return not _is_there(process)


def test_what_a_kernel_changes_in_its_process_is_gone_in_the_next_one(check):
    assert (check("patches").result, check("finds").result) == (OK, OK)


@pytest.mark.thorough
def test_what_a_check_started_ends_with_it_and_the_next_one_runs(check, tmp_path):
    late = check("starts", timeout=6.0)
    assert late.result == FAILED and late.detail[0].startswith("did not end within 6 s")
    (started,) = [int(path.name) for path in tmp_path.iterdir() if path.name.isdigit()]
    assert _gone(started)
    assert check("finds").result == OK


def test_a_check_that_takes_its_worker_along_fails_and_the_next_one_runs(check):
    row = check("kills")
    assert (row.result, row.detail) == (FAILED, ("its process was killed by SIGKILL, at float32",))
    assert check("finds").result == OK


@pytest.fixture
def write_probe(tmp_path, monkeypatch):
    """Writes the module of a probe for workers that are started, and need not wait for torch: it can't be imported."""
    folder = tmp_path / "modules"
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text("raise ImportError('no torch here')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
    return lambda name, text: (folder / f"{name}.py").write_text(text)


@pytest.mark.thorough
def test_a_started_worker_that_a_check_takes_along_is_followed_by_another(write_probe, tmp_path):
    write_probe(
        "kill_probe", "import os, sys\ndef main(arguments): sys.exit(3) if arguments else os.kill(os.getppid(), 9)\n"
    )
    errors = tmp_path / "errors"
    with Checks("kill_probe", 1, {}) as checks:
        assert checks._run([], errors, 60.0) == "its process was killed by SIGKILL"
        assert checks._run(["go on"], errors, 60.0).startswith("its process ended with code 3 before")


def test_a_worker_that_cannot_start_says_why(write_probe):
    checks = Checks("veomni_core.cli.no_such_probe", 1, {})
    (spec,) = [spec for spec in discover().plugin("veomni-torch").kernels if str(spec) == "swiglu_mlp/gelu:torch"]
    row, *_ = checks.rows("veomni-torch", spec, "cpu", ("float32",), 60.0)
    assert row.result == FAILED and "No module named 'veomni_core.cli.no_such_probe'" in row.detail[0]


def test_a_worker_that_is_ended_ends_its_check(tmp_path):
    """As when the user interrupts `veomni verify`."""
    noted, errors = tmp_path / "pid", tmp_path / "errors"
    worker = os.fork()
    if not worker:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        try:
            verify_worker.run_forked(_Sleeps, [str(noted)], errors, 600.0)
        finally:
            os._exit(0)
    while not (noted.exists() and noted.read_text()):
        time.sleep(0.02)
    os.kill(worker, signal.SIGTERM)
    os.waitpid(worker, 0)
    assert _gone(int(noted.read_text()))


class _Sleeps:
    """A probe."""

    __name__ = "sleeps"

    @staticmethod
    def main(arguments):
        Path(arguments[0]).write_text(f"{os.getpid()}")
        time.sleep(600)


@pytest.mark.thorough
def test_where_the_fork_has_lost_the_device_a_new_interpreter_checks(tmp_path, monkeypatch):
    """An import that used the GPU leaves forks without it. It is as if nothing had been imported then."""
    monkeypatch.setattr(verify_worker, "_device_is_lost", lambda: True)
    written = tmp_path / "rows"
    arguments = ["veomni-torch", "swiglu_mlp/gelu:torch", "cpu", "float32", "0/1", str(written)]
    from veomni_conformance.cli import verify_probe

    code = verify_worker.run_forked(verify_probe, arguments, tmp_path / "errors", 300.0)
    assert code == 0 and '"result": "ok"' in written.read_text()


def test_rows_of_parts_are_joined():
    def row(result, detail=(), **cases):
        return Row("k", "float32", result, detail, 1.0, dict.fromkeys(cases, (0.5, 0.5)), {"kernel": 0.25})

    both = joined([row(OK, ("not run: x",), a=1), row(OK, ("not run: x",), b=1)])
    assert both == Row("k", "float32", OK, ("not run: x",), 2.0, {"a": (0.5, 0.5), "b": (0.5, 0.5)}, {"kernel": 0.5})
    assert joined([row(OK, a=1), row(FAILED, ("off",))]).result == FAILED
    assert joined([row(FAILED, ("off",)), row(CONTRACT, ("raises",))]).result == CONTRACT
    assert joined([row(OK), row(OK)]).detail == ("its contract has no samples",)


@pytest.mark.parametrize("jobs, threads", [(1, "2"), (2, "1")])
def test_several_jobs_have_one_thread_each_unless_the_user_says_otherwise(
    monkeypatch, write_probe, tmp_path, jobs, threads
):
    """Two threads in each of as many processes as there are cores wait for each other."""
    write_probe(
        "thread_probe",
        "import os\ndef main(arguments): open(arguments[-1], 'w').write(str(os.environ['OMP_NUM_THREADS']))\n",
    )
    for set_to, wanted in ((None, threads), ("3", "3")):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if set_to:
            monkeypatch.setenv("OMP_NUM_THREADS", set_to)
        with Checks("thread_probe", jobs, {}) as checks:
            assert checks._run([str(tmp_path / "answer")], tmp_path / "errors", 60.0)
        assert (tmp_path / "answer").read_text() == wanted
