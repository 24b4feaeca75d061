"""The tests that ``pytest --veomni-plugin NAME`` adds. Imported only when the option is given."""

from __future__ import annotations

from pathlib import Path

import pytest

from veomni_conformance.kernel_cases import CheckRequest, KernelCase, cases_of
from veomni_conformance.kernel_conformance import run_case
from veomni_core.errors import VeOmniError


class KernelItem(pytest.Item):
    """One kernel in one dtype."""

    def __init__(self, *, case: KernelCase, plugin: str, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.case, self._plugin = case, plugin

    def runtest(self) -> None:
        """Check the kernel."""
        run_case(self.case, lambda name, value: self.user_properties.append((name, value)))

    def reportinfo(self) -> tuple[Path, None, str]:
        """The test's name in headings."""
        return self.path, None, f"{self._plugin} {self.case}"


class KernelItems:
    """Adds the plugins' kernels to what pytest collects. Where no path is given, they are all that it collects."""

    def __init__(self, config: pytest.Config) -> None:
        options = config.option
        self._requests = [
            CheckRequest(name, options.veomni_device, triton_interpreter=options.veomni_triton_interpreter)
            for name in options.veomni_plugin
        ]
        if config.args_source is not pytest.Config.ArgsSource.ARGS:
            config.args.clear()

    @pytest.hookimpl(tryfirst=True)  # before -k deselects
    def pytest_collection_modifyitems(self, session: pytest.Session, items: list[pytest.Item]) -> None:
        """Append one test for each kernel and dtype.

        Raises:
            UsageError: the plugin, or the device, isn't here.
        """
        for request in self._requests:
            try:
                cases = cases_of(request)
            except VeOmniError as error:
                raise pytest.UsageError(f"--veomni-plugin {request.plugin}: {type(error).__name__}: {error}") from error
            tests: list[pytest.Item] = [
                KernelItem.from_parent(
                    session,
                    name=str(case),
                    nodeid=f"{request.plugin}::{case}",
                    path=session.path,
                    case=case,
                    plugin=request.plugin,
                )
                for case in cases
            ]
            # What pytest prints as collected is counted by these reports.
            report = pytest.CollectReport(request.plugin, "passed", None, list(tests))
            session.config.hook.pytest_collectreport(report=report)
            items += tests
