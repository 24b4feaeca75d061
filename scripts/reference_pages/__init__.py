"""The pages that list what the code has, and the tables in docs/benchmarks.

``PAGES`` are whole pages of docs/reference, which are generated when the site is built and not kept in the repository.
``PARTS`` are pages of docs/benchmarks that have a generated table. ``scripts/generate.py`` writes both.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from faults import page as faults
from reference_pages import asked, benchmarks, command_line, config, errors, hooks, job, kernels, ops

PAGES: dict[str, Callable[[], str]] = {
    "kernels.md": kernels.page,
    "ops.md": ops.page,
    "asked.md": asked.page,
    "faults.md": faults.page,
    "hooks.md": hooks.page,
    "errors.md": errors.page,
    "verbs.md": command_line.page,
    "fields.md": config.page,
    "job.md": job.page,
}
PARTS: dict[Path, Callable[[], str]] = {
    benchmarks.PAGES / f"{name}.md": partial(benchmarks.page, name) for name in benchmarks.TABLES
}
