"""``veomni report``: a run's report from its files, or several runs on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from veomni_core.commands import AsJson, print_json
from veomni_core.errors import ConfigError


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="The folders of one run, or of up to eight.")],
    output: Annotated[
        Path | None, typer.Option("--output", help="The page of several runs; by default comparison.html.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Write a run's report from what its folder holds, or compare several runs on one page."""
    if output and len(runs) == 1:
        raise ConfigError("--output names the page of several runs; one run's report is report.html in its folder")

    from veomni_trainer.report.runs import comparison_of, read_runs, run_folder, write_comparison
    from veomni_trainer.report.write import describe_run, figures_table, write_report

    if len(runs) == 1:
        folder = run_folder(runs[0])
        write_report(folder)
        print(folder.summary.read_text(encoding="utf-8") if json else describe_run(folder))
        return
    read = read_runs(runs)
    if output or not json:
        page = output or Path("comparison.html")
        write_comparison(read, page)
    if json:
        print_json(comparison_of(read))
    else:
        print(f"{figures_table({run.label: run.figures for run in read})}\nreport: {page}")
