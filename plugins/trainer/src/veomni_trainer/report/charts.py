"""Draws the report's charts as SVG that takes its colours from the page, for light and dark mode."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import matplotlib

from veomni_trainer.output.metrics import Row, training_rows

# matplotlib needs real colours. These are placeholders that are replaced by the page's colours in the finished SVG.
_INK, _GRID, _MINE, _EAGER = "#010101", "#020202", "#030303", "#040404"
_PAGE_COLOURS = {_INK: "currentColor", _GRID: "var(--grid)", _MINE: "var(--mine)", _EAGER: "var(--eager)"}
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "font.size": 10,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.7,
    "xtick.color": _GRID,
    "ytick.color": _GRID,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    "legend.frameon": False,
}

Value = Callable[[Row], float]


@dataclass(frozen=True)
class Chart:
    """A drawing with its title and note."""

    title: str
    note: str
    svg: str


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
    matplotlib.use("svg")
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    style: dict[Any, Any] = {**_STYLE, "svg.hashsalt": name}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(6.4, 3.0), layout="constrained")
        axes = figure.subplots()
        if eager:  # a wide line below the other one, so that both are visible where they coincide
            steps = [row["step"] for row in eager]
            axes.plot(steps, [value(row) for row in eager], color=_EAGER, linewidth=5, alpha=0.45, label="all eager")
        label = "this job" if eager or validation else None
        axes.plot([row["step"] for row in mine], [value(row) for row in mine], color=_MINE, linewidth=1.6, label=label)
        if validation:
            points = [row["step"] for row in validation], [row["validation_loss"] for row in validation]
            axes.plot(*points, "o", color=_MINE, markersize=5, label="validation")
        if label:
            axes.legend(loc="best")
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if top != "free":
            axes.set_ylim(0, top)
        stream = io.StringIO()
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _for_page(stream.getvalue(), name)


def _for_page(svg: str, name: str) -> str:
    """The ``<svg>`` element alone. Scales with its container, has unique ids, uses the page's font and colours."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r'\1 role="img"', svg, count=1)
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r'(url\(|href=")#', rf"\1#{name}-", svg)
    svg = re.sub(r"font-family: [^;\"]*;? ?", "", svg)
    svg = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", svg)
    for placeholder, colour in _PAGE_COLOURS.items():
        svg = svg.replace(placeholder, colour)
    return svg
