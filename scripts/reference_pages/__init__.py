"""The pages that list what the code has: kernels, ops, hooks, errors, verbs, fields; and the tables of benchmarks.

``make reference`` writes them (``python -m reference_pages`` in the folder ``scripts``); a test compares them with the
code.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from reference_pages import benchmarks, command_line, config, errors, hooks, kernels, ops

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "reference"
PAGES: dict[str, Callable[[], str]] = {
    "kernels.md": kernels.page,
    "ops.md": ops.page,
    "hooks.md": hooks.page,
    "errors.md": errors.page,
    "command-line.md": command_line.page,
    "config.md": config.page,
    **{f"../benchmarks/{name}.md": partial(benchmarks.page, name) for name in benchmarks.TABLES},
}
