"""The report's charts: how losses, times and loads went over the steps."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Literal

from veomni_trainer.output.metrics import Row, training_rows
from veomni_trainer.report.drawing import EAGER, MINE, Chart, draw

Value = Callable[[Row], float]


def draw_charts(rows: list[Row], eager_rows: list[Row]) -> list[Chart]:
    """The charts of loss, router loss, difference from eager, step time and peak memory, as far as there is data."""
    mine, eager = training_rows(rows), training_rows(eager_rows)
    validation = [row for row in rows if "validation_loss" in row]
    charts = [Chart("Loss", "per step", _lines("loss", mine, eager, lambda row: row["loss"], validation))]
    if any("aux_loss" in row for row in mine):
        charts.append(Chart("Router loss", "load balancing", _lines("aux", mine, eager, lambda row: row["aux_loss"])))
    theirs = {row["step"]: row["loss"] for row in eager}
    common = [row for row in mine if row["step"] in theirs]
    if common:
        gap = _lines("gap", common, [], lambda row: abs(row["loss"] - theirs[row["step"]]))
        charts.append(Chart("Loss difference from eager", "absolute, per step", gap))
    for key, what in (("expert_load", "expert"), ("rank_load", "rank")):
        if loaded := [row for row in mine if key in row]:
            lines = _lines(key, loaded, [], operator.itemgetter(key))
            charts.append(Chart(f"Busiest {what}", "rows over the mean, average of the layers", lines))
    if sent := [row for row in mine if "dispatch_bytes" in row]:
        moved = _lines("sent", sent, [], lambda row: row["dispatch_bytes"] / 1e6, top=None)
        charts.append(Chart("Token dispatch", "MB that ranks send each other, per step", moved))
    top, above = _step_time_scale([*mine, *eager])
    times = _lines("time", mine, eager, _milliseconds, top=top)
    memory = _lines("memory", mine, eager, lambda row: row["peak_memory_bytes"] / 1e9, top=None)
    note = "milliseconds" + (f"; above the chart: {above} slow step{'s' * (above > 1)}" if above else "")
    return [*charts, Chart("Step time", note, times), Chart("Peak memory", "GB so far", memory)]


def _milliseconds(row: Row) -> float:
    return float(1e3 * row["step_seconds"])


def _step_time_scale(rows: list[Row]) -> tuple[float | None, int]:
    """The end of the axis, so that a few slow steps don't flatten the others; and how many steps are beyond it."""
    times = sorted(_milliseconds(row) for row in rows)
    if not times:
        return None, 0
    top = 1.5 * times[int(0.95 * (len(times) - 1))]
    return (top, sum(time > top for time in times)) if times[-1] > top else (None, 0)


def _lines(
    name: str,
    mine: list[Row],
    eager: list[Row],
    value: Value,
    validation: list[Row] | None = None,
    top: float | Literal["free"] | None = "free",
) -> str:
    """One drawing as SVG.

    Args:
        top: The end of the vertical axis, which then begins at zero; ``None``: zero to the largest value; ``"free"``:
            matplotlib chooses both ends.
    """
    from matplotlib.ticker import MaxNLocator

    def lines(axes: Any) -> None:
        if eager:  # a wide line below the other one, so that both are visible where they coincide
            steps = [row["step"] for row in eager]
            axes.plot(steps, [value(row) for row in eager], color=EAGER, linewidth=5, alpha=0.45, label="all eager")
        label = "this job" if eager or validation else None
        axes.plot([row["step"] for row in mine], [value(row) for row in mine], color=MINE, linewidth=1.6, label=label)
        if validation:
            points = [row["step"] for row in validation], [row["validation_loss"] for row in validation]
            axes.plot(*points, "o", color=MINE, markersize=5, label="validation")
        if label:
            axes.legend(loc="best")
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if top != "free":
            axes.set_ylim(0, top)

    return draw(name, lines)
