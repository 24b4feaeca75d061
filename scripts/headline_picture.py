"""Draws docs/images/whole_steps.svg: time and memory of whole training steps, from the figures in benchmarks/results.

``make generate`` runs this. Tests hold the picture to the figures.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "images" / "whole_steps.svg"
MODELS = {
    "train_step_llama_1b_h200": "Llama of the 1B shape",
    "train_step_qwen3_moe_h200": "Qwen3-MoE's widths, 4 layers",
}
CONTENDERS = {
    "transformers": "transformers",
    "transformers, compiled": "torch.compile",
    "Liger's own patch": "Liger's own patch",
    "preset: auto": "preset: auto",
}
BATCH = "4x4096"
_OURS, _THEIRS, _INK = "#1f6feb", "#b4bcc6", "#24292f"


@dataclass(frozen=True)
class Step:
    """A forward and backward: milliseconds, and the peak of the GPU's memory in GB."""

    milliseconds: float
    peak_gb: float

    def __str__(self) -> str:
        return f"{self.milliseconds:.0f} ms, {self.peak_gb:.1f} GB"


def steps(page: str) -> dict[str, Step]:
    """The steps of a result file, by contender."""
    data = json.loads((ROOT / "benchmarks" / "results" / f"{page}.json").read_text(encoding="utf-8"))
    batches = {name: data["contenders"][name]["batches"][BATCH] for name in CONTENDERS}
    return {name: Step(each["ms"], each["peak GB"]) for name, each in batches.items()}


def draw() -> None:
    """Write the picture: a row of bars for each contender, with its figures as text."""
    style = {"svg.fonttype": "none", "svg.hashsalt": PICTURE.stem, "font.size": 10, "text.color": _INK}
    with matplotlib.rc_context(style):  # type: ignore[arg-type]
        figure = Figure(figsize=(9.6, 2.5), layout="constrained", facecolor="white")
        for axes, (page, title) in zip(figure.subplots(1, len(MODELS)), MODELS.items(), strict=True):
            found = steps(page)
            times = [step.milliseconds for step in found.values()]
            colours = [_OURS if name == "preset: auto" else _THEIRS for name in found]
            bars = axes.barh([CONTENDERS[name] for name in found], times, color=colours, height=0.62)
            axes.bar_label(bars, labels=[str(step) for step in found.values()], padding=5)
            axes.set_title(title, loc="left", fontsize=11)
            axes.set_xlim(0, 1.42 * max(times))  # room for the text behind the longest bar
            axes.invert_yaxis()
            axes.set_xticks([])
            axes.tick_params(left=False)
            axes.spines[:].set_visible(False)
        figure.savefig(PICTURE, metadata={"Date": None, "Creator": None})
