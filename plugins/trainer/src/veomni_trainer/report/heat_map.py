"""The report's heat map: how many rows each expert got, step by step."""

from __future__ import annotations

from typing import Any

import numpy as np

from veomni_trainer.output.metrics import Row
from veomni_trainer.report.drawing import Chart, draw

_LINES, _COLUMNS = 256, 600  # more than these can't be told apart on the page
_HOT = 3.0  # the brightest colour is this many times the mean


def draw_loads(rows: list[Row]) -> Chart:
    """A line for every expert, layer by layer from the top; a column for every step. Many become one by their maximum.

    Args:
        rows: of ``expert_rows.jsonl``.
    """
    steps = [row["step"] for row in rows]
    counts = np.array([row["rows"] for row in rows], float)  # [steps, layers, experts]
    loads = counts / np.maximum(counts.mean(-1, keepdims=True), 1e-9)
    layers = loads.shape[1]
    image = _fewer(_fewer(loads.reshape(len(rows), -1), _COLUMNS).T, _LINES)

    from matplotlib.ticker import MaxNLocator

    def picture(axes: Any) -> None:
        extent = (steps[0] - 0.5, steps[-1] + 0.5, layers, 0)
        drawn = axes.imshow(
            image, aspect="auto", cmap="magma", vmin=0, vmax=_HOT, extent=extent, interpolation="nearest"
        )
        axes.grid(visible=False)
        axes.set_xlabel("step")
        axes.set_ylabel("layer")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(integer=True))
        axes.figure.colorbar(drawn, ax=axes, label="rows over the layer's mean", extend="max")

    words = (
        f"Rows of each expert over its layer's mean, steps {steps[0]} to {steps[-1]}, {layers} layers. "
        f"The largest is {loads.max():.3g} times the mean."
    )
    drawing = draw("experts", picture, words, height=4.2)
    return Chart("Experts' loads", "each line an expert, each column a step", drawing)


def _fewer(image: np.ndarray[Any, Any], most: int) -> np.ndarray[Any, Any]:
    """At most ``most`` rows: neighbours become their maximum."""
    starts = np.arange(0, len(image), -(-len(image) // most))
    return np.asarray(np.maximum.reduceat(image, starts))
