"""`make bench BASE=…`: two revisions of a repository are measured in turns, and a loss fails.

Most tests run everything but the kernels: small repositories have a benchmark that reads its figures off the kernel.
"""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from bench_repositories import KERNEL, ROOT, SCRIPT, Repository

pytestmark = pytest.mark.thorough


@pytest.fixture
def compare(repository, revisions, capfd):
    """Runs the comparison in ``repository``; gives its exit status and what it prints."""
    guarded = (revisions("selection").Guarded("kda/kda.py", "cpu", ("stub",)),)

    def run(*arguments: str) -> tuple[int, str]:
        asked = ["--devices", "cpu", *arguments]
        status = revisions("compare_revisions").main(["HEAD~1", *asked], repository.folder, guarded)
        return status, capfd.readouterr().out

    return run


def test_a_planted_loss_fails_and_is_named(repository, compare):
    repository.kernel(seconds=0.01)
    repository.commit()
    repository.kernel(seconds=0.011)
    repository.commit()
    status, printed = compare()
    assert status == 1
    for shape in ("small", "large"):
        assert f"LOSS: kda on cpu, stub, {shape}: time 1.100 (1.100 to 1.100), all of it above 1.03" in printed
    times = ("10.000 ms", "11.000 ms", "1.100 (1.100 to 1.100)", "")
    cells = ("kda on cpu", "stub", "small", *times, "1.0 MiB / 1.0 MiB")
    assert f"| {' | '.join(cells)} |" in printed


def test_the_head_is_the_working_tree(repository, compare):
    repository.kernel()
    repository.commit()
    repository.commit()
    assert compare()[0] == 0
    repository.kernel(seconds=0.02)
    assert compare()[0] == 1


def test_more_memory_is_a_loss_as_well(repository, compare):
    repository.kernel(size=100 << 20)
    repository.commit()
    repository.kernel(size=104 << 20)
    repository.commit()
    status, printed = compare("--shapes", "small")
    assert status == 1
    assert "LOSS: kda on cpu, stub, small: memory 1.040" in printed
    assert "large" not in printed


def test_a_loss_of_the_graph_alone_fails(repository, compare):
    """A host that is slow hides it from the time."""
    repository.kernel(seconds=0.01, graph=0.001)
    repository.commit()
    repository.kernel(seconds=0.01, graph=0.002)
    repository.commit()
    status, printed = compare("--shapes", "small")
    assert status == 1
    assert "LOSS: kda on cpu, stub, small: graph 2.000" in printed
    repository.kernel(seconds=0.01)
    status, printed = compare("--shapes", "small")
    assert (status, "LOSS" in printed) == (0, False)


def test_a_gain_and_a_small_loss_pass(repository, compare):
    repository.kernel(seconds=0.01, size=100 << 20)
    repository.commit()
    repository.kernel(seconds=0.008, size=102 << 20)
    repository.commit()
    status, printed = compare("--shapes", "small")
    assert (status, "| time: gain |" in printed, "LOSS" in printed) == (0, True, False)


def test_too_few_pairs_are_unclear_and_say_so(repository, compare):
    repository.kernel(seconds=0.01)
    repository.commit()
    repository.kernel(seconds=0.02)
    repository.commit()
    status, printed = compare("--pairs", "2", "--shapes", "small")
    assert status == 0
    assert "time unclear, more pairs needed: --pairs 5" in printed


def test_a_kernel_that_the_base_lacks_is_new(repository, compare):
    repository.write("README.md", "Nothing yet.")
    (repository.folder / SCRIPT).unlink()
    repository.commit()
    repository.kernel()
    repository.measures()
    repository.commit()
    status, printed = compare()
    assert status == 0
    assert "| new: cannot import name 'kda' from 'veomni_stub'" in printed


def test_a_benchmark_that_the_head_lacks_is_gone(repository, compare):
    repository.kernel()
    repository.write("benchmarks/rms_norm/rms_norm.py", "import math\nBENCHMARK = None")
    repository.commit()
    (repository.folder / "benchmarks/rms_norm/rms_norm.py").unlink()
    repository.kernel(more="# changed")
    repository.commit()
    status, printed = compare()
    assert status == 0
    assert "gone: benchmarks/rms_norm/rms_norm.py is not in the working tree" in printed


def test_a_kernel_that_the_base_s_own_benchmark_names_is_gone(repository, compare):
    repository.kernel(more="LAUNCH = 1")
    repository.measures("LAUNCH", kernel="older")
    repository.commit()
    repository.kernel(more="LAUNCHES = (1,)")
    repository.measures("LAUNCHES")
    repository.commit()
    status, printed = compare("--shapes", "small")
    assert status == 0
    rows = [line for line in printed.splitlines() if line.startswith("| kda")]
    assert [row.split(" | ")[1:5] for row in rows] == [
        ["older", "small", "10.000 ms", "-"],
        ["stub", "small", "-", "10.000 ms"],
    ]
    assert "| gone: the head has no such kernel or shape |" in rows[0]
    assert "| new: the base has no such kernel or shape |" in rows[1]


def test_an_import_that_the_head_broke_is_no_pass(repository, compare):
    repository.kernel()
    repository.commit()
    (repository.folder / KERNEL).unlink()
    repository.commit()
    status, printed = compare()
    assert status == 2
    assert "the head failed\ncannot import name 'kda' from 'veomni_stub'" in printed


def test_a_package_that_the_base_lacks_is_not_taken_from_what_is_installed(repository, compare, monkeypatch, tmp_path):
    """Editable installs and wheels of the head lie on the path behind the base's packages."""
    repository.write("README.md", "Nothing yet.")
    shutil.rmtree(repository.folder / "plugins")
    repository.commit()
    repository.write("plugins/stub/src/veomni_stub/__init__.py", "")
    repository.kernel()
    repository.commit()
    monkeypatch.setenv("PYTHONPATH", str(repository.folder / "plugins/stub/src"))
    status, printed = compare()
    assert status == 0
    assert "| new: No package named 'veomni_stub'" in printed


def test_what_only_the_benchmark_imports_may_be_renamed(repository, compare):
    """Each revision then runs its own script, and the loss is seen all the same."""
    repository.kernel(seconds=0.01, more="LAUNCH = 1")
    repository.measures("LAUNCH")
    repository.commit()
    repository.kernel(seconds=0.02, more="LAUNCHES = (1,)")
    repository.measures("LAUNCHES")
    repository.commit()
    status, printed = compare("--shapes", "small")
    assert status == 1
    assert "the base is measured by its own script, since: cannot import name 'LAUNCHES'" in printed
    assert "stub, small: time 2.000" in printed


@pytest.mark.parametrize("broken", ["base", "head"])
def test_a_benchmark_that_fails_is_no_pass(repository, compare, broken):
    for revision in ("base", "head"):
        repository.kernel(more="raise ValueError('a broken kernel')" if revision == broken else f"# {revision}")
        repository.commit()
    status, printed = compare()
    assert status == 2
    assert f"FAILED: kda on cpu was not measured: the {broken} failed" in printed
    assert "ValueError: a broken kernel" in printed


def test_a_benchmark_that_measures_nothing_of_ours_is_no_pass(repository, compare):
    repository.kernel()
    repository.commit()
    (repository.folder / SCRIPT).write_text(
        "from benchmarks.shared.benchmark import Benchmark\nimport veomni_stub\n"
        "BENCHMARK = Benchmark({'cpu': {'small': 1}}, lambda *_: {'seconds': {}, 'peak bytes': {}}, ours=('stub',))\n"
    )
    repository.kernel(more="# changed")
    repository.commit()
    status, printed = compare()
    assert status == 2
    assert "measured none of ['stub'] at ['small']" in printed


def test_one_process_measures_several_and_what_fails_is_tried_alone(repository, revisions, capfd):
    repository.kernel()
    repository.write("benchmarks/linear/linear.py", (repository.folder / SCRIPT).read_text(encoding="utf-8"))
    repository.write("benchmarks/dsa/dsa.py", "raise ValueError('a broken script')")
    names = ("kda", "dsa", "linear")
    kda, dsa, linear = (revisions("selection").Guarded(f"{name}/{name}.py", "cpu", ("stub",)) for name in names)
    found = revisions("turns").OneProcess("head", repository.folder, repository.folder, ["--first"])([kda, dsa, linear])
    assert [*found[kda]] == [("stub", "small")] and found[linear] == found[kda]
    assert found[dsa].startswith("the head failed") and "ValueError: a broken script" in found[dsa]
    assert capfd.readouterr().err.splitlines() == ["kda on cpu, dsa on cpu, linear on cpu: head", "dsa on cpu: head"]


def test_what_has_not_changed_is_not_run(repository, compare):
    repository.kernel()
    repository.commit()
    repository.write("docs/page.md", "A page.")
    repository.measures("SECONDS  # another comment")
    repository.commit()
    status, printed = compare()
    assert status == 0
    assert "No kernel that is measured on cpu has other sources than at HEAD~1." in printed
    assert "no loss" in compare("--only", "kda")[1]


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["nowhere"], "BASE=nowhere names no commit here"),
        (["HEAD", "--pair", "none"], "argument --pairs: invalid int value"),
        (["HEAD", "--only", "kad"], "ONLY=kad has no benchmark on cpu; there are kda"),
    ],
)
def test_what_is_not_there_is_said(repository, revisions, capsys, arguments, said):
    repository.kernel()
    repository.commit()
    guarded = (revisions("selection").Guarded("kda/kda.py", "cpu", ("stub",)),)
    with pytest.raises(SystemExit) as stop:
        revisions("compare_revisions").main([*arguments, "--devices", "cpu"], repository.folder, guarded)
    assert stop.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.thorough
def test_make_bench_compares_a_real_kernel_in_a_clone(tmp_path):
    """The command that `make` would run, on a CPU kernel whose source differs. One pair gives no verdict."""
    for part in ("benchmarks", "core/src", *(str(each.relative_to(ROOT)) for each in ROOT.glob("plugins/*/src"))):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    clone = Repository.__new__(Repository)
    clone.folder = tmp_path
    clone.git("init", "--quiet")
    clone.commit()
    kernel = tmp_path / "plugins/torch_native/src/veomni_torch/causal_conv1d.py"
    kernel.write_text(kernel.read_text(encoding="utf-8") + "# Changed.\n", encoding="utf-8")
    clone.commit()
    # Under `make test` this make is a sub-make, whose last line says that it leaves its directory.
    make = ["make", "--no-print-directory", "--dry-run", "bench", "BASE=HEAD~1", "PAIRS=1"]
    command = subprocess.run(make, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()[-1].split()
    assert command[0].endswith("/bin/python")
    quick = ["--devices", "cpu", "--shapes", "short", "--repeats", "1"]
    printed = subprocess.run(
        [sys.executable, *command[1:], *quick], cwd=tmp_path, check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    (row,) = (line for line in printed.splitlines() if line.startswith("| causal_conv1d"))
    assert row.startswith("| causal_conv1d on cpu | torch | short | ")
    assert "25.1 MiB / 25.1 MiB | 1.000 (1.000 to 1.000)" in row
