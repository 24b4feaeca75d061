"""The report's charts: how losses, rates, times and loads went over the steps."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from veomni_trainer.output.metrics import Row
from veomni_trainer.report.drawing import PLACEHOLDERS, Chart, draw

Points = list[tuple[int, float]]

_MANY_STEPS = 200  # a line of more steps is drawn faintly, with a smoothed one on it
_DASH = 5.0  # the length of a dash, in widths of the line
_LINES, _COLUMNS = 256, 600  # of the heat map: more than these can't be told apart on the page
_HOT = 3.0  # its brightest colour is this many times the mean

# Title and note of what a method measures beside its loss, by its name in a row of metrics.
_CURVES = {
    "entropy": ("Entropy", "nats per token"),
    "mean_token_accuracy": ("Token accuracy", "share of the learned tokens"),
    "rewards/accuracies": ("Pairs the right way round", "share of the pairs"),
    "rewards/margins": ("Reward margin", "chosen over rejected"),
    "accuracy": ("Accuracy", "share of the texts or pairs"),
    "margin": ("Margin", "score of the chosen over that of the rejected"),
    "mean_reward": ("Mean score", "over the chosen and the rejected"),
    "nll_loss": ("Loss of the chosen", "per token"),
    "log_odds_chosen": ("Log odds ratio", "chosen over rejected"),
    "rewards/chosen": ("Reward of the chosen", "beta times the log-ratio to the reference"),
    "rewards/rejected": ("Reward of the rejected", "beta times the log-ratio to the reference"),
    "logps/chosen": ("Log-probability of the chosen", "sum over its tokens"),
    "logps/rejected": ("Log-probability of the rejected", "sum over its tokens"),
    "reward": ("Reward", "mean over the completions"),
    "reward_std": ("Reward spread", "standard deviation over the completions"),
    "kl": ("Divergence from the reference", "per token"),
    "completions/mean_length": ("Completion length", "tokens, on average"),
    "completions/clipped_ratio": ("Completions that were cut off", "share"),
    "rollout_difference/mean": ("Training beside the rollout", "log-probabilities, on average"),
    "rollout_difference/largest": ("Training beside the rollout, largest", "log-probabilities"),
    "clip_ratio/region_mean": ("Clipped ratios", "share of the tokens"),
}
_OF_ALL_METHODS = {
    "learning_rate": ("Learning rate", "per step"),
    "grad_norm": ("Gradient norm", "before clipping"),
    "expert_load": ("Busiest expert", "rows over the mean, average of the layers"),
    "rank_load": ("Busiest rank", "rows over the mean, average of the layers"),
}
_REWARD = re.compile(r"rewards/(.+)/mean")


@dataclass(frozen=True)
class Series:
    """A run in the charts: its name, the page's variable with its colour, and its rows of metrics."""

    label: str
    colour: str
    rows: list[Row]

    def points(self, key: str, factor: float = 1.0) -> Points:
        """Step, and ``factor`` times the value, of each row that has ``key``."""
        return [(row["step"], factor * row[key]) for row in self.rows if key in row]


@dataclass
class _Lines:
    """What one chart shows.

    Attributes:
        top: the end of the vertical axis, which then begins at zero; ``"free"``: matplotlib chooses both ends.
    """

    title: str
    note: str
    lines: list[tuple[Series, Points]]
    validations: list[tuple[Series, Points]] = field(default_factory=list)
    top: float | Literal["free"] = "free"


def draw_charts(*runs: Series) -> list[Chart]:
    """The charts of losses, rates, times and memory of one run or of several, as far as there is data."""
    shown = [run for run in runs if run.points("loss")]
    losses = _of(shown, "loss", "Loss", "per step")
    losses.validations = [(run, points) for run in shown if (points := run.points("validation_loss"))]
    charts = [losses, _of(shown, "aux_loss", "Router loss", "load balancing"), _gap(shown)]
    charts += [_of(shown, name, *words) for name, words in _CURVES.items()]
    names = dict.fromkeys(name for run in shown for row in run.rows for name in row)
    judged = [(name, found[1]) for name in names if (found := _REWARD.fullmatch(name))]
    for name, function in judged if len(judged) > 1 else ():
        charts.append(_of(shown, name, f"Reward of {function}", "mean over the completions"))
    charts += [_of(shown, name, *words) for name, words in _OF_ALL_METHODS.items()]
    moved = "MB that ranks send each other, per step"
    charts.append(_scaled(_of(shown, "dispatch_bytes", "Token dispatch", moved, 1e-6)))
    charts.append(_step_time(shown))
    charts.append(_scaled(_of(shown, "tflops", "Arithmetic", "TFLOP/s of each device")))
    charts.append(_scaled(_of(shown, "peak_memory_bytes", "Peak memory", "GB so far", 1e-9)))
    return [_draw(chart) for chart in charts if chart.lines]


def _of(runs: list[Series], key: str, title: str, note: str, factor: float = 1.0) -> _Lines:
    lines = [(run, run.points(key, factor)) for run in runs]
    return _Lines(title, note, [(run, points) for run, points in lines if points])


def _scaled(chart: _Lines) -> _Lines:
    """From zero to a little above the largest value, so that the line is inside."""
    if chart.lines:
        chart.top = 1.1 * max(value for _, points in chart.lines for _, value in points) or 1.0
    return chart


def _short(label: str) -> str:
    """A label that leaves room for the lines in a legend."""
    return label if len(label) <= 24 else f"...{label[-21:]}"


def _gap(runs: list[Series]) -> _Lines:
    """How far the first run's losses are from the second one's."""
    chart = _Lines("Loss difference", "absolute, per step", [])
    if len(runs) == 2:
        mine, other = (dict(run.points("loss")) for run in runs)
        if common := [(step, abs(loss - other[step])) for step, loss in mine.items() if step in other]:
            chart.title += " from eager" if runs[1].colour == "eager" else f" from {_short(runs[1].label)}"
            chart.lines = [(runs[0], common)]
    return chart


def _step_time(runs: list[Series]) -> _Lines:
    """A few slow steps don't flatten the others: they are above the chart, and counted."""
    chart = _scaled(_of(runs, "step_seconds", "Step time", "milliseconds", 1e3))
    times = sorted(value for _, points in chart.lines for _, value in points)
    if times and times[-1] > (end := 1.5 * times[int(0.95 * (len(times) - 1))]):
        chart.top = end
        above = sum(time > end for time in times)
        chart.note += f"; above the chart: {above} slow step{'s' * (above > 1)}"
    return chart


def _draw(chart: _Lines) -> Chart:
    from matplotlib.ticker import MaxNLocator

    def lines(axes: Any) -> None:
        # The others are dashes on the first run's line, each in its own place, so that equal curves are all seen.
        others = len(chart.lines) - 1
        for number, (run, points) in enumerate(chart.lines):
            dashes = (number * _DASH, (_DASH, others * _DASH)) if number else "solid"
            style: dict[str, Any] = {"color": PLACEHOLDERS[run.colour]}
            if len(points) > _MANY_STEPS:
                if not others:  # two faint lines would mix their colours
                    axes.plot(*zip(*points, strict=True), linewidth=0.6, alpha=0.35, **style)
                points = smoothed(points)
            axes.plot(*zip(*points, strict=True), linewidth=1.8, label=_short(run.label), linestyle=dashes, **style)
        for run, points in chart.validations:
            alone = len(chart.validations) == 1
            own = PLACEHOLDERS["validation" if alone or run.colour == "mine" else run.colour]
            label = "validation" if alone else f"{_short(run.label)}, validation"
            label = label if len(chart.validations) <= 2 else "_"  # of many runs, points in the run's colour say enough
            size = 5 if len(points) <= 30 else 2.5
            axes.plot(*zip(*points, strict=True), "o-", color=own, markersize=size, linewidth=1, label=label)
        if len(chart.lines) + len(chart.validations) > 1:
            axes.legend(loc="best").set_in_layout(False)
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if chart.top != "free":
            axes.set_ylim(0, chart.top)

    shown = [in_words(run.label, points) for run, points in chart.lines]
    shown += [in_words(f"validation of {run.label}", points) for run, points in chart.validations]
    words = f"{chart.title}, {chart.note}: {'; '.join(shown)}."
    return Chart(chart.title, chart.note, draw(re.sub(r"\W+", "-", chart.title.lower()), lines, words))


def smoothed(points: Points) -> Points:
    """The exponential moving average over about a fiftieth of ``points``; values that are not finite are left out.

    Example:
        >>> smoothed([(step, 2.0) for step in range(3)])
        [(0, 2.0), (1, 2.0), (2, 2.0)]
    """
    keep = 1 - 1 / max(len(points) / 50, 1)
    total = weight = 0.0
    line = []
    for step, value in points:
        if math.isfinite(value):
            total, weight = keep * total + value, keep * weight + 1
            line.append((step, total / weight))
    return line


def in_words(label: str, points: Points) -> str:
    """What a line shows: ``this job from 3 at step 1 to 0.15 at step 20, between 0.15 and 3``."""
    finite = [value for _, value in points if math.isfinite(value)]
    if not finite:
        return f"{label} without a finite value"
    (first, start), (last, end) = points[0], points[-1]
    between = f"between {min(finite):.4g} and {max(finite):.4g}"
    return f"{label} from {start:.4g} at step {first} to {end:.4g} at step {last}, {between}"


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
