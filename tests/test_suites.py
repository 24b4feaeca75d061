"""The test commands: what each selects, that parts are the whole, and that the budget holds."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = {
    "test_marked.py": """
        import pytest

        def test_plain(): pass

        @pytest.mark.thorough
        def test_thorough(): pass

        @pytest.mark.docs
        def test_docs(): pass

        @pytest.mark.thorough(one_per=["kernel"])
        @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
        @pytest.mark.parametrize("kernel", [f"kernel{number}" for number in range(12)])
        def test_kernel(kernel, dtype): pass

        @pytest.mark.thorough(one_per=["function"])
        @pytest.mark.parametrize("backend", ["eager", "compiled"])
        @pytest.mark.parametrize("function", [lambda: 1, lambda: 2, lambda: 3], ids=["one", "two", "three"])
        def test_function(function, backend): pass

        @pytest.mark.thorough(one_per=[])
        @pytest.mark.parametrize("machine", [
            "a",
            "b",
            pytest.param("c", marks=pytest.mark.skip(reason="not here")),
            *(pytest.param(f"dear {number}", marks=pytest.mark.thorough) for number in range(20)),
        ])
        def test_machine(machine): pass

        @pytest.mark.docs(one_per=[])
        @pytest.mark.parametrize("page", ["start", "tutorial"])
        def test_page(page): pass

        @pytest.mark.parametrize("size", ["small", pytest.param("large", marks=pytest.mark.thorough)])
        def test_size(size): pass
    """,
    "test_all_thorough.py": """
        import pytest
        pytestmark = pytest.mark.thorough  # nothing here is sampled
        open("imported", "w").close()

        def test_dear(): pass
    """,
    "test_all_docs.py": """
        import pytest
        pytestmark = pytest.mark.docs

        def test_pages(): pass
    """,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("suites")
    for name, source in FILES.items():
        (root / name).write_text(textwrap.dedent(source))
    return root


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "suites.selection", "-p", "suites.cpu_time", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS"):
        environment.pop(name, None)
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def selected(folder: Path, *arguments: str) -> set[str]:
    printed = run(folder, "--collect-only", *arguments).stdout
    return {line.partition("::")[2] for line in printed.splitlines() if "::" in line}


def test_the_default_suite_leaves_out_what_is_marked_and_keeps_the_samples(folder):
    (folder / "imported").unlink(missing_ok=True)
    names = selected(folder, "--suite", "test")
    kernels = {name for name in names if name.startswith("test_kernel")}
    assert {name.split("-")[0] for name in kernels} == {f"test_kernel[kernel{number}" for number in range(12)}
    assert len(kernels) == 12, "one dtype of each kernel"
    assert {name.split("-")[1] for name in kernels} == {"float32]", "bfloat16]", "float16]"}, "all dtypes, over all"
    functions = {name.split("-")[0] for name in names if name.startswith("test_function")}
    assert functions == {"test_function[one", "test_function[two", "test_function[three"}, "values without a text"
    assert len([name for name in names if name.startswith("test_function")]) == 3
    machines = {name for name in names if name.startswith("test_machine")}
    assert len(machines) == 1 and machines < {"test_machine[a]", "test_machine[b]"}, (
        "one that can run here, and is not marked itself"
    )
    assert len({name for name in names if name.startswith("test_page")}) == 1
    others = {
        name for name in names if not name.startswith(("test_kernel", "test_function", "test_machine", "test_page"))
    }
    assert others == {"test_plain", "test_size[small]"}
    assert not (folder / "imported").exists(), "a file that is marked whole isn't imported"
    assert selected(folder, "--suite", "test") == names, "the same in each process"


def test_the_docs_suite_runs_what_is_marked_docs(folder):
    assert selected(folder, "--suite", "docs") == {"test_docs", "test_page[start]", "test_page[tutorial]", "test_pages"}


def test_without_an_option_everything_that_is_named_runs_and_parts_are_the_whole(folder):
    everything = selected(folder)
    assert len(everything) == 1 + 1 + 1 + 36 + 6 + 23 + 2 + 2 + 1 + 1
    parts = [selected(folder, "--part", f"{which}/3") for which in (1, 2, 3)]
    assert sum(map(len, parts)) == len(everything) and set().union(*parts) == everything


def test_a_part_that_is_none_is_refused(folder):
    refused = run(folder, "--part", "4/3")
    assert refused.returncode == 4 and "4/3: write K/N with 1 <= K <= N, as 3/8" in refused.stderr


def test_the_dearest_files_are_printed_and_a_suite_far_over_its_budget_fails(folder, tmp_path):
    (tmp_path / "test_dear.py").write_text("def test_dear():\n    sum(range(3_000_000))\n")
    within = run(tmp_path, "--suite", "test")
    assert within.returncode == 0 and "test_dear.py" in within.stdout and "over the budget" not in within.stdout
    (tmp_path / "conftest.py").write_text("import suites.cpu_time\nsuites.cpu_time.BUDGET = 1e-3\n")
    over = run(tmp_path, "--suite", "test")
    assert over.returncode == 1 and "over the budget" in over.stdout and "1 passed" in over.stdout
    assert run(tmp_path).returncode == 0, "only make test has a budget"
