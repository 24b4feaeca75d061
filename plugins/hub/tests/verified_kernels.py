"""The kernels of a registry, checked in this process as ``veomni verify`` does."""

from __future__ import annotations

from veomni_conformance import check_kernel
from veomni_conformance.cli import verify as command
from veomni_conformance.cli.verify_processes import FAILED, OK, Row
from veomni_core import Hardware

CPU = Hardware.cpu()


def verified(registry, *, dtype="float32"):
    """What ``veomni verify veomni-hub --dtype float32`` does, in this process; the failures."""
    record = registry.plugin("veomni-hub")
    reports = {str(spec): check_kernel(spec, "cpu", dtype) for spec in record.kernels}
    rows = [
        Row(name, dtype, OK if report.ok else FAILED, tuple(report.failures), cases={"odd": (0.5, 0.1)})
        for name, report in reports.items()
    ]
    command.keep_results(rows, record, CPU)
    return [failure for report in reports.values() for failure in report.failures]
