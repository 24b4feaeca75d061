"""Draws lines over steps as SVG that takes its colours from the page, for light and dark mode.

A report has about ten charts, and is written anew while its job trains. matplotlib took 0.1 s for each of them, which
was half of a tiny job's time; this takes 1 ms.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from xml.sax.saxutils import quoteattr

from veomni_trainer.report.scale import Scale
from veomni_trainer.report.series import Points

_WIDTH, _HEIGHT = 403.2, 194.4
_TOP, _RIGHT, _BOTTOM = 8.0, 12.0, 34.0  # free beside the axes; on the left it depends on the numbers
_LETTER, _LINE = 5.8, 14.0  # the width and height that a letter takes in text of 10 units
_SAMPLE = 26.0  # of a line, in the legend
_COLUMN = 0.5  # values that lie closer together than this are drawn as one vertical line
_TEXT = 'style="font-size: 10px; fill: currentColor"'


@dataclass(frozen=True)
class Line:
    """A line in a chart.

    Attributes:
        points: steps and values; the line has a gap at a value that is not finite.
        colour: the page's variable with its colour.
        label: in the legend; a line without one is not in it.
        radius: of the dot at each point.
    """

    points: Points
    colour: str
    width: float
    label: str = ""
    opacity: float = 1.0
    radius: float = 0.0


def draw_lines(name: str, lines: Sequence[Line], words: str, top: float | None = None) -> str:
    """The ``<svg>`` element, whose ids begin with ``name``; of two lines that cross, the later one is above.

    Args:
        words: what the drawing shows, for readers that don't see it.
        top: the end of the vertical axis, which then begins at zero.
    """
    values = [value for line in lines for _, value in line.points]
    bottom_edge = _HEIGHT - _BOTTOM
    y = Scale.over(values, bottom_edge, _TOP) if top is None else Scale(0.0, top, bottom_edge, _TOP)
    y_ticks = y.ticks(8)
    left = 12.0 + _LETTER * max((len(text) for _, text in y_ticks), default=0)
    x = Scale.over([step for line in lines for step, _ in line.points], left, _WIDTH - _RIGHT)
    x_ticks = x.ticks(9, whole=True)
    parts = [
        f'<svg role="img" aria-label={quoteattr(words)} viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'xmlns="http://www.w3.org/2000/svg">',
        f'<clipPath id="{name}-axes"><rect x="{left:.1f}" y="{_TOP}" width="{x.end - left:.1f}" '
        f'height="{bottom_edge - _TOP:.1f}"/></clipPath>',
        *_axes(x, y, x_ticks, y_ticks),
        f'<g clip-path="url(#{name}-axes)">',
        *(part for line in lines for part in _drawn(line, x, y)),
        "</g>",
        *_legend(lines, x, y),
        "</svg>",
    ]
    return "\n".join(parts)


def _axes(x: Scale, y: Scale, x_ticks: list[tuple[float, str]], y_ticks: list[tuple[float, str]]) -> Iterator[str]:
    """The grid, the two axes, and what is written beside them."""
    grid = [f"M{x.at(value):.1f} {y.start:.1f}V{y.end:.1f}" for value, _ in x_ticks]
    grid += [f"M{x.start:.1f} {y.at(value):.1f}H{x.end:.1f}" for value, _ in y_ticks]
    yield f'<path d="{"".join(grid)}" style="fill: none; stroke: var(--grid); stroke-width: 0.7"/>'
    corner = f"M{x.start:.1f} {y.end:.1f}V{y.start:.1f}H{x.end:.1f}"
    yield f'<path d="{corner}" style="fill: none; stroke: var(--grid); stroke-width: 1.1"/>'
    for value, text in x_ticks:
        yield f'<text x="{x.at(value):.1f}" y="{y.start + 13:.1f}" text-anchor="middle" {_TEXT}>{text}</text>'
    for value, text in y_ticks:
        yield f'<text x="{x.start - 5:.1f}" y="{y.at(value) + 3.5:.1f}" text-anchor="end" {_TEXT}>{text}</text>'
    middle = (x.start + x.end) / 2
    yield f'<text x="{middle:.1f}" y="{_HEIGHT - 5:.1f}" text-anchor="middle" {_TEXT}>step</text>'


def _drawn(line: Line, x: Scale, y: Scale) -> Iterator[str]:
    """The line, and its dots. A point between two gaps is a dot, or it would not be seen."""
    pieces = _pieces(line.points)
    paths = [_few([(x.at(step), y.at(value)) for step, value in piece]) for piece in pieces if len(piece) > 1]
    if paths:
        d = "".join("M" + "L".join(f"{across:.1f} {up:.1f}" for across, up in path) for path in paths)
        opacity = f"; opacity: {line.opacity}" if line.opacity < 1 else ""
        stroke = f"stroke: var(--{line.colour}); stroke-width: {line.width}"
        yield f'<path d="{d}" style="fill: none; {stroke}; stroke-linejoin: round; stroke-linecap: round{opacity}"/>'
    for piece in pieces:
        for step, value in piece if line.radius or len(piece) == 1 else ():
            centre = f'cx="{x.at(step):.1f}" cy="{y.at(value):.1f}"'
            yield f'<circle {centre} r="{line.radius or line.width}" style="fill: var(--{line.colour})"/>'


def _pieces(points: Points) -> list[Points]:
    """The parts of ``points`` between values that are not finite."""
    pieces: list[Points] = [[]]
    for step, value in points:
        if math.isfinite(value):
            pieces[-1].append((step, value))
        elif pieces[-1]:
            pieces.append([])
    return [piece for piece in pieces if piece]


def _few(path: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of many points above one another the first, the lowest, the highest and the last: no more can be seen."""
    columns: dict[int, list[tuple[float, float]]] = {}
    for point in path:
        columns.setdefault(int(point[0] / _COLUMN), []).append(point)
    kept = []
    for column in columns.values():
        ends = {0, len(column) - 1}
        by_height = sorted(range(len(column)), key=lambda number, column=column: column[number][1])  # type: ignore[misc]
        kept += [column[number] for number in sorted(ends | {by_height[0], by_height[-1]})]
    return kept


def _legend(lines: Sequence[Line], x: Scale, y: Scale) -> Iterator[str]:
    """Labels in the corner that hides the least; none of one line alone."""
    labelled = [line for line in lines if line.label]
    if len(labelled) < 2:
        return
    width = _SAMPLE + 6 + _LETTER * max(len(line.label) for line in labelled)
    height = _LINE * len(labelled)
    corners = [(left, top) for top in (y.end + 3, y.start - height - 3) for left in (x.end - width - 4, x.start + 6)]
    hidden = [point for line in lines for point in _along(line.points, x, y)]

    def covers(corner: tuple[float, float]) -> int:
        left, top = corner
        return sum(left <= across <= left + width and top <= up <= top + height for across, up in hidden)

    left, top = min(corners, key=covers)
    for number, line in enumerate(labelled):
        middle = top + _LINE * (number + 0.5)
        stroke = f"stroke: var(--{line.colour}); stroke-width: {line.width}"
        yield f'<path d="M{left:.1f} {middle:.1f}h{_SAMPLE - 6}" style="{stroke}"/>'
        if line.radius:
            centre = f'cx="{left + (_SAMPLE - 6) / 2:.1f}" cy="{middle:.1f}"'
            yield f'<circle {centre} r="{line.radius}" style="fill: var(--{line.colour})"/>'
        yield f'<text x="{left + _SAMPLE:.1f}" y="{middle + 3.5:.1f}" {_TEXT}>{escape(line.label)}</text>'


def _along(points: Points, x: Scale, y: Scale) -> Iterator[tuple[float, float]]:
    """Places on the line, between its points too where these are few."""
    for piece in _pieces(points):
        placed = [(x.at(step), y.at(value)) for step, value in piece]
        yield from placed
        for (from_x, from_y), (to_x, to_y) in pairwise(placed) if len(placed) < 50 else ():
            for part in (0.2, 0.4, 0.6, 0.8):
                yield from_x + part * (to_x - from_x), from_y + part * (to_y - from_y)
