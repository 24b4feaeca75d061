"""The processes of ``veomni verify``: each check is a fork, which ends with all that it started."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from veomni_conformance.cli import verify_probe
from veomni_conformance.cli.verify_processes import CONTRACT, FAILED, OK, Check, Checks, Row, joined
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
    """Checks one of the plugin's kernels, in a fork of the server from which the one before was forked."""
    install("forked-plugin", PLUGIN.replace("{folder}", str(tmp_path)))
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(tmp_path / "site-packages"), os.environ.get("PYTHONPATH", "")])
    )
    specs = {spec.name: spec for spec in discover().plugin("forked-plugin").kernels}

    def run(name, timeout=120.0):
        (row,) = Checks("cpu", 1, timeout).rows([Check("forked-plugin", specs[name], "float32")])
        return row

    return run


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


@pytest.mark.thorough  # the server that follows imports everything again
def test_a_check_that_takes_the_server_along_fails_and_the_next_one_runs(check):
    row = check("kills")
    assert row.result == FAILED and row.detail[0].startswith("its process ended with code 255")
    assert check("finds").result == OK


RUNS = """
import signal
from veomni_conformance.cli import verify_probe
from veomni_conformance.cli.verify_processes import Check, Checks
from veomni_core.discovery.discover import discover

spec = discover().plugin("forked-plugin").kernels[2]
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with it ignored
    Checks("cpu", 1).rows([Check("forked-plugin", spec, "float32")])
"""


@pytest.mark.thorough
@pytest.mark.parametrize("ended_by", [signal.SIGINT, signal.SIGKILL])
def test_a_command_that_is_ended_ends_its_check(check, tmp_path, ended_by):
    command = subprocess.Popen([sys.executable, "-c", RUNS], start_new_session=True, stderr=subprocess.DEVNULL)
    while not (started := [int(path.name) for path in tmp_path.iterdir() if path.name.isdigit()]):
        time.sleep(0.05)
        assert command.poll() is None
    status = Path(f"/proc/{started[0]}/status").read_text()
    parent = int(re.search(r"PPid:\s*(\d+)", status)[1])
    os.kill(command.pid, ended_by)
    command.wait()
    assert _gone(parent) and _gone(started[0])


@pytest.mark.thorough
def test_where_the_fork_has_lost_the_device_a_new_interpreter_checks(tmp_path, monkeypatch):
    """An import that used the GPU leaves forks without it. It is as if nothing had been imported then."""
    monkeypatch.setattr(verify_probe, "_needs_an_interpreter_of_its_own", lambda environment: True)
    request = verify_probe.Request("veomni-torch", "swiglu_mlp/gelu:torch", "float32", "cpu", str(tmp_path / "row"))
    process = multiprocessing.get_context("fork").Process(
        target=verify_probe.begin, args=(request, str(tmp_path / "errors"), dict(os.environ))
    )
    process.start()
    process.join(300)
    assert process.exitcode == 0 and '"result": "ok"' in (tmp_path / "row").read_text()


def test_rows_of_parts_are_joined():
    def row(result, detail=(), **cases):
        return Row("k", "float32", result, detail, 1.0, dict.fromkeys(cases, (0.5, 0.5)), {"kernel": 0.25})

    both = joined([row(OK, ("not run: x",), a=1), row(OK, ("not run: x",), b=1)])
    assert both == Row("k", "float32", OK, ("not run: x",), 2.0, {"a": (0.5, 0.5), "b": (0.5, 0.5)}, {"kernel": 0.5})
    assert joined([row(OK, a=1), row(FAILED, ("off",))]).result == FAILED
    assert joined([row(FAILED, ("off",)), row(CONTRACT, ("raises",))]).result == CONTRACT
    assert joined([row(OK), row(OK)]).detail == ("its contract has no samples",)


@pytest.mark.parametrize("jobs, threads", [(1, "2"), (2, "1")])
def test_several_jobs_have_one_thread_each_unless_the_user_says_otherwise(monkeypatch, jobs, threads):
    """Two threads in each of as many processes as there are cores wait for each other."""
    for set_to, wanted in ((None, threads), ("3", "3")):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if set_to:
            monkeypatch.setenv("OMP_NUM_THREADS", set_to)
        assert Checks("cpu", jobs)._environment["OMP_NUM_THREADS"] == wanted


@pytest.mark.parametrize("detail", ["raised OutOfMemoryError: CUDA out of memory.", "CUBLAS_STATUS_ALLOC_FAILED"])
@pytest.mark.parametrize(("jobs", "wanted"), [(2, OK), (1, FAILED)])
def test_a_check_that_shared_the_memory_is_made_again_alone(monkeypatch, detail, jobs, wanted):
    running, lonely = [], []

    def checked(self, check):
        running.append(check)
        lonely.append(running.count(check) > 1)
        return Row(check.dtype, check.dtype, OK, ()) if lonely[-1] else Row(check.dtype, check.dtype, FAILED, (detail,))

    monkeypatch.setattr(Checks, "_checked", checked)
    spec = discover().plugin("veomni-torch").kernels[0]
    rows = Checks("cpu", jobs).rows([Check("veomni-torch", spec, dtype) for dtype in ("float32", "bfloat16")])
    assert [row.result for row in rows] == [wanted, wanted]
    assert sum(lonely) == (2 if jobs > 1 else 0)
