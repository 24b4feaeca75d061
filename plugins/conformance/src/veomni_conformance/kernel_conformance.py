"""``KernelConformance``, from which an author's test class inherits the tests of every kernel of a plugin.

pytest is imported when it collects such a class. The core does not depend on it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from veomni_conformance.kernel_cases import CheckRequest, KernelCase, cases_of
from veomni_core.errors import ConformanceError, SpecError, VeOmniError

Recorder = Callable[[str, object], None]
_CASE = "kernel_case"


class KernelConformance:
    """Tests every kernel of a plugin against its op's contract, in every dtype that the kernel declares.

    A subclass whose name begins with ``Test`` and that names a plugin is all that a test file needs. Each kernel and
    dtype is one test. A kernel that can't run on this machine is skipped, with the reason. What was not asked of a
    kernel is in the test's properties (``not asked``), which JUnit's XML shows.

    Attributes:
        plugin: the plugin's name or its distribution's.
        device: where, as torch names it; what this machine has if it is ``None``.
        dtypes: only these dtypes; all that a kernel declares if it is empty.
        kernels: only these kernels, by name or as ``op/variant:name``; all if it is empty.
        triton_interpreter: on a machine without an accelerator, run kernels for GPUs in Triton's interpreter, on small
            samples. Triton must not have been imported before without ``TRITON_INTERPRET=1``.
        expected_failures: why a kernel is known to fail, by kernel (``op/variant:name``) or by test
            (``op/variant:name-dtype``). One that passes is a failure: its entry must go. A kernel that was seen to be
            wrong on such a machine (``KernelSpec.suspicions``) may fail there, or pass.

    A plugin or a kernel that isn't there ends the collection of the class with the error's message.

    Example:
        >>> class TestMyKernels(KernelConformance):
        ...     plugin = "veomni-torch"
        ...     expected_failures = {"rms_norm/standard:torch-float16": "overflows above 255"}
        >>> TestMyKernels.plugin
        'veomni-torch'
    """

    plugin: ClassVar[str] = ""
    device: ClassVar[str | None] = None
    dtypes: ClassVar[tuple[str, ...]] = ()
    kernels: ClassVar[tuple[str, ...]] = ()
    triton_interpreter: ClassVar[bool] = False
    expected_failures: ClassVar[Mapping[str, str]] = {}

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Make a test of each kernel and dtype. pytest calls this when it collects the class."""
        if _CASE not in metafunc.fixturenames:
            return
        cases = collected(self._request())
        metafunc.parametrize(_CASE, cases, ids=[str(case) for case in cases])

    def test_kernel(self, kernel_case: KernelCase, record_property: Recorder) -> None:
        """The kernel keeps its op's contract."""
        run_case(kernel_case, record_property)

    def test_description_imports_no_torch(self) -> None:
        """The module that describes the plugin, and its hooks, import neither torch nor a kernel library."""
        import pytest

        if problem := imports_of_the_description(self.plugin):
            pytest.fail(problem, pytrace=False)

    def _request(self) -> CheckRequest:
        return CheckRequest(
            self.plugin, self.device, self.dtypes, self.kernels, self.triton_interpreter, self.expected_failures
        )


def collected(request: CheckRequest) -> list[KernelCase]:
    """The request's cases. An error ends pytest's collection with its message, without a traceback."""
    import pytest

    try:
        if not request.plugin:
            raise SpecError("a subclass of KernelConformance must name its plugin: plugin = 'acme'")
        return cases_of(request)
    except VeOmniError as error:
        raise pytest.Collector.CollectError(f"{type(error).__name__}: {error}") from error


def run_case(case: KernelCase, record_property: Recorder) -> None:
    """Run one case as a test: it passes, fails with the report's sentences, is skipped, or fails as expected."""
    import pytest

    if case.skip:
        pytest.skip(f"{case.spec}: {case.skip}")
    try:
        report = case.check()
        for words in report.skipped:
            record_property("not asked", words)
        report.raise_if_failed()
    except ConformanceError as error:
        if why := case.expected or case.suspected:
            pytest.xfail(f"{why}\n{error}")
        pytest.fail(str(error), pytrace=False)
    except VeOmniError as error:
        pytest.fail(f"{type(error).__name__}: {error}", pytrace=False)
    if case.expected:
        pytest.fail(f"{case} is expected to fail ({case.expected}), and passes: remove it", pytrace=False)


# What a description must leave alone: these take seconds to import, or need a device's libraries.
_HEAVY = ("torch", "triton", "transformers", "numpy", "jax")
_DESCRIBE = """
import sys
from veomni_core.discovery.discover import discover
before = set(sys.modules)
record = discover({"VEOMNI_PLUGINS": sys.argv[1]}).plugin(sys.argv[1])
print(record.absence if not record.healthy else "", *sorted(set(sys.argv[2:]) & (set(sys.modules) - before)), sep="\\n")
"""


def imports_of_the_description(plugin: str) -> str:
    """A sentence about the heavy libraries that describing a plugin imports, in a process of its own; or ``""``."""
    command = [sys.executable, "-c", _DESCRIBE, plugin, *_HEAVY]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return f"{plugin} could not be described in a process of its own:\n{done.stderr.strip()}"
    problem, *imported = done.stdout.rstrip("\n").split("\n")
    if problem:
        return f"{plugin} {problem}"
    if imported:
        return (
            f"describing {plugin} imports {', '.join(imported)}: import it in the kernels' own modules, so that "
            "`veomni list` stays fast and a missing library is an answer"
        )
    return ""
