"""An author's three lines, and ``pytest --veomni-plugin``, each in a pytest of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from forked_processes import Forked, finish

KERNELS = """
from veomni_core import HardwareRequirement, KernelSpec, hookimpl

VEOMNI_PLUGIN_API_VERSION = 1

def right(gate, up):
    from torch.nn.functional import silu
    return silu(gate) * up

def doubled(gate, up):
    return 2 * right(gate, up)

@hookimpl
def veomni_kernels():
    spec = dict(op_name="swiglu_mlp", variant="standard", dtypes=("float32",))
    return [
        KernelSpec("right", factory="{module}:right", **spec),
        KernelSpec("doubled", factory="{module}:doubled", **spec),
        KernelSpec("elsewhere", factory="{module}:right", hardware=HardwareRequirement("far"), **spec),
    ]
"""
RIGHT, DOUBLED = "swiglu_mlp/standard:right", "swiglu_mlp/standard:doubled"


def _pytest(*arguments):
    sys.exit(pytest.main([*arguments]))


@pytest.fixture
def run_pytest(tmp_path):
    """Runs pytest in an empty folder, with the plugin as the entry point of ``core/pyproject.toml`` has it."""
    folder = tmp_path / "author"
    folder.mkdir()
    paths = [str(tmp_path / "site-packages"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment = {name: value for name, value in environment.items() if not name.startswith("PYTEST_XDIST")}

    def run(*arguments, code, test=None, fresh=False):
        if test:
            (folder / "test_mine.py").write_text(f"from veomni_conformance import KernelConformance\n\n{test}")
        options = ("-p", "veomni_conformance.pytest_plugin", "-p", "no:cacheprovider", "-rA", "--tb=short")
        if fresh:
            command = [sys.executable, "-m", "pytest", *options, *arguments]
            done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
        else:  # most of a run's time goes into importing torch
            fork = Forked(_pytest, *options, *arguments, environment=environment, folder=folder, path=paths[:1])
            (done,) = finish([fork], timeout=120)
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stdout + done.stderr and "INTERNALERROR" not in done.stdout
        return done.stdout + done.stderr

    return run


@pytest.fixture
def acme(install):
    return install("acme-kernels", KERNELS, plugin="acme")


def test_three_lines_test_every_kernel_of_a_plugin(run_pytest, acme):
    test = 'class TestMyKernels(KernelConformance):\n    plugin = "acme"\n'
    text = run_pytest(test=test, code=1, fresh=True)
    assert f"PASSED test_mine.py::TestMyKernels::test_kernel[{RIGHT}-float32]" in text
    assert f"FAILED test_mine.py::TestMyKernels::test_kernel[{DOUBLED}-float32]" in text
    assert f"{DOUBLED} on cpu in float32 breaks its contract" in text
    assert "sample 'odd width': the result is off" in text
    assert "swiglu_mlp/standard:elsewhere: needs device type far, this is" in text
    assert "1 failed, 2 passed, 1 skipped" in text


@pytest.mark.thorough
def test_an_expected_failure_has_a_reason_and_must_fail(run_pytest, acme):
    expected = {DOUBLED: "known: twice as large", f"{RIGHT}-float32": "known to be wrong"}
    test = f'class TestMyKernels(KernelConformance):\n    plugin = "acme"\n    expected_failures = {expected}\n'
    text = run_pytest(test=test, code=1)
    assert f"XFAIL test_mine.py::TestMyKernels::test_kernel[{DOUBLED}-float32] - known: twice as large" in text
    assert f"{RIGHT}-float32 is expected to fail (known to be wrong), and passes: remove it" in text


@pytest.mark.thorough
def test_a_kernel_that_was_seen_to_be_wrong_here_may_fail_or_pass(run_pytest, install):
    seen = 'suspicions=(Suspicion(HardwareRequirement(), "wrong here"),)'
    declared = KERNELS.replace("import HardwareRequirement", "import HardwareRequirement, Suspicion")
    assert declared != KERNELS
    install("acme-kernels", declared.replace('dtypes=("float32",)', f'dtypes=("float32",), {seen}'), plugin="acme")
    text = run_pytest(test='class TestMyKernels(KernelConformance):\n    plugin = "acme"\n', code=0)
    assert f"XFAIL test_mine.py::TestMyKernels::test_kernel[{DOUBLED}-float32] - wrong here" in text
    assert f"PASSED test_mine.py::TestMyKernels::test_kernel[{RIGHT}-float32]" in text


@pytest.mark.thorough
def test_attributes_choose_what_is_checked(run_pytest, acme):
    test = 'class TestMyKernels(KernelConformance):\n    plugin = "acme-kernels"\n    kernels = ("right",)\n'
    text = run_pytest("--collect-only", "-q", test=f'{test}    dtypes = ("float32",)\n    device = "cpu"\n', code=0)
    assert text.count("test_kernel[") == 1 and f"test_kernel[{RIGHT}-float32]" in text


@pytest.mark.thorough
@pytest.mark.parametrize(
    "attributes, message",
    [
        ('plugin = "acne"', "UnknownNameError: plugin 'acne' is not installed. Did you mean 'acme'?"),
        ("", "SpecError: a subclass of KernelConformance must name its plugin"),
        ('plugin = "acme"; kernels = ("rigt",)', "UnknownNameError: kernels: there is no 'rigt' here"),
        ('plugin = "acme"; dtypes = ("int8",)', "UnknownNameError: dtypes: there is no 'int8' here"),
        ('plugin = "acme"; device = "far"', "HostError: device far: this machine has no such device"),
        ('plugin = "acme"; expected_failures = {"x": ""}', "UnknownNameError: expected_failures: there is no 'x'"),
        ('plugin = "veomni-core"', "describes no kernels, so there is nothing to check"),
    ],
)
def test_a_mistake_ends_the_collection_with_its_error(run_pytest, acme, attributes, message):
    body = attributes.replace("; ", "\n    ") or "pass"
    assert message in run_pytest(test=f"class TestMyKernels(KernelConformance):\n    {body}\n", code=2)


@pytest.mark.thorough
def test_an_option_checks_a_plugin_without_a_test_file(run_pytest, acme):
    other = "def test_other():\n    assert 0\n"
    text = run_pytest("--veomni-plugin", "acme", "--veomni-device", "cpu", test=other, code=1, fresh=True)
    assert f"PASSED acme::{RIGHT}-float32" in text and f"FAILED acme::{DOUBLED}-float32" in text
    assert "1 failed, 1 passed, 1 skipped" in text
    assert "collected 3 items" in text


@pytest.mark.thorough
def test_beside_a_path_the_option_adds_to_what_is_collected(run_pytest, acme):
    text = run_pytest(
        "--veomni-plugin", "acme", "-k", "right or other", "test_mine.py", test="def test_other():\n    pass\n", code=0
    )
    assert "PASSED test_mine.py::test_other" in text and f"PASSED acme::{RIGHT}-float32" in text
    assert "2 passed, 2 deselected" in text


@pytest.mark.thorough
def test_an_option_that_is_wrong_is_a_usage_error(run_pytest, acme):
    text = run_pytest("--veomni-plugin", "acne", code=4)
    assert "ERROR: --veomni-plugin acne: UnknownNameError: plugin 'acne' is not installed" in text


@pytest.mark.thorough
def test_a_description_that_imports_torch_fails(run_pytest, install):
    install("acme-kernels", f"import torch\n{KERNELS}", plugin="acme")
    test = 'class TestMyKernels(KernelConformance):\n    plugin = "acme"\n'
    text = run_pytest("-k", "description", test=test, code=1)
    assert "describing acme imports numpy, torch: import it in the kernels' own modules" in text


def test_unasked_the_plugin_imports_nothing(run_pytest, tmp_path):
    (tmp_path / "author" / "test_imports.py").write_text(
        "import sys\n\ndef test_what_is_imported():\n"
        "    assert not {'torch', 'triton', 'transformers', 'yaml'} & set(sys.modules)\n"
        "    ours = {name for name in sys.modules if name.startswith('veomni_')}\n"
        "    assert ours == {'veomni_conformance', 'veomni_conformance.pytest_plugin'}\n"
    )
    assert "1 passed" in run_pytest(code=0, fresh=True)


def test_pytest_finds_the_plugin_by_its_entry_point():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"veomni": "veomni_conformance.pytest_plugin"}
