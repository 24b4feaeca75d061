"""Draws with matplotlib as SVG that takes its colours from the page, for light and dark mode."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import quoteattr

import matplotlib

# matplotlib needs real colours. These are placeholders that are replaced by the page's colours in the finished SVG.
_INK, _GRID = "#010101", "#020202"
COLOURS = ("mine", "eager", "run3", "run4", "run5", "run6", "run7", "run8")  # of runs, as style.css names them
PLACEHOLDERS = {name: f"#0303{number:02x}" for number, name in enumerate((*COLOURS, "validation"), start=16)}
_PAGE_COLOURS = {
    _INK: "currentColor",
    _GRID: "var(--grid)",
    **{placeholder: f"var(--{name})" for name, placeholder in PLACEHOLDERS.items()},
}
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


@dataclass(frozen=True)
class Chart:
    """A drawing with its title and note."""

    title: str
    note: str
    svg: str


# Of a drawing of 5.6 by 2.7 inches: at the left there is room for numbers of seven digits.
_MARGINS = {"left": 0.125, "right": 0.97, "bottom": 0.18, "top": 0.94}


def draw(name: str, lines: Callable[[Any], None], words: str, height: float = 0.0) -> str:
    """What ``lines`` draws on matplotlib's axes, as SVG whose ids begin with ``name``.

    Args:
        words: what the drawing shows, for readers that don't see it.
        height: in inches. matplotlib then makes room for what is beside the axes, for which it draws everything twice:
            90 ms in place of 40, which a report of ten charts pays each time that it is renewed.
    """
    matplotlib.use("svg")
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {**_STYLE, "svg.hashsalt": name}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(5.6, height or 2.7), layout="constrained" if height else None)
        lines(figure.subplots(gridspec_kw=None if height else _MARGINS))
        stream = io.StringIO()
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _for_page(stream.getvalue(), name, words)


def _for_page(svg: str, name: str, words: str) -> str:
    """The ``<svg>`` element alone. Scales with its container, has unique ids, uses the page's font and colours."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = svg.replace("<svg ", f'<svg role="img" aria-label={quoteattr(words)} ', 1)
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r'(url\(|href=")#', rf"\1#{name}-", svg)
    svg = re.sub(r"font-family: [^;\"]*;? ?", "", svg)
    svg = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", svg)
    for placeholder, colour in _PAGE_COLOURS.items():
        svg = svg.replace(placeholder, colour)
    return svg
