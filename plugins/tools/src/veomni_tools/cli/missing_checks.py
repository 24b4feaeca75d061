"""Runs the conformance checks that kernels still need before they may be measured, and keeps their results."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from veomni_conformance.cli.verify import keep_results
from veomni_conformance.cli.verify_processes import OK, Check, Checks, Row, import_once
from veomni_conformance.ledger import Ledger
from veomni_core.descriptions.hardware import Hardware
from veomni_core.descriptions.kernel_spec import KernelSpec
from veomni_core.discovery.registry import Registry
from veomni_core.planning.evidence import HERE


@dataclass(frozen=True)
class MissingChecks:
    """How checks are run.

    Attributes:
        registry: the plugins of the kernels.
        hardware: what is here.
        jobs: how many checks run at a time.
        timeout: seconds that one may take.
        slow: whether those are run that take many minutes.
        say: prints a line for each check that is over.
    """

    registry: Registry
    hardware: Hardware
    jobs: int
    timeout: float
    slow: bool
    say: Callable[[str], None]

    def run(self, needed: Iterable[tuple[KernelSpec, tuple[str, ...]]]) -> dict[KernelSpec, str]:
        """Check each kernel in the dtypes in which it has neither passed here nor failed.

        Returns:
            The kernels that have not passed in all of their dtypes, each with the reason.
        """
        ledger, why_not = Ledger.here(self.hardware), dict[KernelSpec, str]()
        asked: list[tuple[KernelSpec, str]] = []
        for spec, dtypes in needed:
            plugin = self.registry.plugin_of(spec)
            for dtype in dtypes:
                if ledger.standing(spec, plugin, (dtype,)) == HERE:
                    continue
                if failures := ledger.failures(spec, plugin, (dtype,)):
                    why_not[spec] = failures[0]
                elif spec.slow_check and not self.slow:
                    why_not[spec] = f"not checked in {dtype}: slow to check, --slow checks it too: {spec.slow_check}"
                else:
                    asked.append((spec, dtype))
        for row, spec in self._checked([each for each in asked if each[0] not in why_not]):
            if row.result != OK:
                why_not[spec] = f"failed its check in {row.dtype}: {(row.detail or ('no reason was given',))[0]}"
        return why_not

    def _checked(self, asked: list[tuple[KernelSpec, str]]) -> list[tuple[Row, KernelSpec]]:
        """A row for each kernel and dtype, which is kept for this machine's plans."""
        if not asked:
            return []
        self.say(f"{len(asked)} checks of kernels that are not certified here, {self.jobs} at a time")
        import_once()
        rows = Checks(self.hardware.torch_device_type, self.jobs, self.timeout).rows(
            [Check(self.registry.plugin_of(spec).name, spec, dtype) for spec, dtype in asked],
            lambda _, row: self.say(f"{row.kernel} in {row.dtype}: {row.result} in {row.seconds:.0f} s"),
        )
        for (spec, _), row in zip(asked, rows, strict=True):
            keep_results([row], self.registry.plugin_of(spec), self.hardware)
        return [(row, spec) for row, (spec, _) in zip(rows, asked, strict=True)]
