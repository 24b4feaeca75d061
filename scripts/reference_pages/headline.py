"""The plot of docs/benchmarks: of each GPU's results the fastest of our kernels beside its best peer.

``make generate`` draws it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import matplotlib
from matplotlib.figure import Figure

from reference_pages.repository import ROOT
from reference_pages.speeds import HEADLINES, Share, shown

PICTURE = ROOT / "docs" / "images" / "kernel_speeds.svg"
_OURS, _THEIRS, _INK = "#1f6feb", "#b4bcc6", "#24292f"


@dataclass(frozen=True)
class Line:
    """The fastest of our kernels at the shape that stands for a result file."""

    op: str
    share: Share

    @property
    def gpu(self) -> str:
        """Of "NVIDIA H100 80GB HBM3", H100."""
        return self.share.where.removeprefix("NVIDIA ").split()[0]


def lines() -> list[Line]:
    """One for each shape of a GPU's results in :data:`HEADLINES`, by op."""
    return [
        Line(op, min(headline.shares(), key=lambda share: share.ours.milliseconds))
        for op, headlines in HEADLINES.items()
        for headline in headlines
        if next(headline.shares()).where.startswith("NVIDIA")
    ]


def bars() -> Iterator[tuple[str, float, str]]:
    """Of each bar of the plot: its name, its length, and the text behind it."""
    for line in lines():
        share = line.share
        times = f"{shown(share.ours.milliseconds)} ms, {share.peer} {shown(share.peer_milliseconds)}"
        yield f"{line.op}, {share.kernel}, {line.gpu}", share.of_peer, f"{share.of_peer:.2f}: {times}"


def draw() -> None:
    """Write the plot: our time as a share of the best peer's, with the peer's as a line."""
    style = {"svg.fonttype": "none", "svg.hashsalt": PICTURE.stem, "font.size": 10, "text.color": _INK}
    names, shares, texts = zip(*bars(), strict=True)
    with matplotlib.rc_context(style):  # type: ignore[arg-type]
        figure = Figure(figsize=(9.6, 0.32 * len(names) + 0.6), layout="constrained", facecolor="white")
        axes = figure.subplots()
        places = range(len(names))
        colours = [_OURS if round(share, 2) <= 1 else _THEIRS for share in shares]
        axes.barh(places, shares, color=colours, height=0.62)
        for place, share, text in zip(places, shares, texts, strict=True):
            axes.annotate(text, (max(share, 1), place), (6, 0), textcoords="offset points", va="center")
        axes.axvline(1, color=_INK, linewidth=0.8)
        axes.set_yticks(places, names)
        axes.set_title("Forward and backward, as a share of the best peer's time", loc="left", fontsize=11)
        axes.set_xlim(0, 1.9 * max(shares))  # room for the text behind the longest bar
        axes.invert_yaxis()
        axes.set_xticks([])
        axes.tick_params(left=False)
        axes.spines[:].set_visible(False)
        figure.savefig(PICTURE, metadata={"Date": None, "Creator": None})
