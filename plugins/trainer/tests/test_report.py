"""The comparison's numbers, the charts and the page."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from veomni_trainer.output.folder import RunFolder
from veomni_trainer.output.metrics import append_metrics
from veomni_trainer.report.charts import Series, draw_charts, smoothed
from veomni_trainer.report.comparison import compare_rows, comparison_sentence
from veomni_trainer.report.write import RunEnding, describe_run, write_report

RECEIPT = {
    "hardware": "cpu (CPU)",
    "plan_sha256": "ab" * 32,
    "transformations": [
        {"name": "binding", "description": "plan abababababab for cpu (CPU)"},
        {"name": "sequence parallelism", "description": "Ulysses, sp=2, over sdpa"},
    ],
    "kernels": [
        {
            "kernel": "rms_norm/standard:torch",
            "factory": "veomni_torch.rms_norm:rms_norm",
            "distribution": "veomni-core",
            "version": "0.1.0",
        }
    ],
    "ops": [
        {
            "field": "rms_norm_implementation",
            "op": "rms_norm",
            "asked": {"default": "torch", "model.layers.0.*": "eager"},
            "written": True,
            "chosen": ["torch"],
            "bound": 4,
            "found": 5,
            "eager": [{"path": "model.layers.0.<norm>", "reason": "eager was asked for"}],
        },
        {
            "field": "moe_implementation",
            "op": "moe_experts",
            "asked": "auto",
            "written": False,
            "chosen": [],
            "bound": 0,
            "found": 0,
            "eager": [],
        },
    ],
}


def _rows(count: int, seconds: float = 0.1, memory: int = 10**9, shift: float = 0.0) -> list[dict[str, Any]]:
    return [
        {
            "step": step,
            "loss": 3.0 / step + (shift if step == 7 else 0.0),
            "aux_loss": 2.0,
            "step_seconds": seconds,
            "tokens_per_second": 100 / seconds,
            "peak_memory_bytes": memory,
        }
        for step in range(1, count + 1)
    ]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A finished run with an all-eager one beside it."""
    folder = RunFolder(tmp_path / "tiny <run>")
    for run, rows in ((folder, _rows(20, shift=0.25)), (folder.compared("eager"), _rows(20, 0.2, 2 * 10**9))):
        run.path.mkdir()
        for row in rows:
            append_metrics(run.metrics, row)
    append_metrics(folder.metrics, {"step": 20, "validation_loss": 1.25})
    folder.receipt.write_text(json.dumps(RECEIPT), encoding="utf-8")
    folder.job.write_text("model: <&>\n", encoding="utf-8")
    return folder


def test_runs_are_compared_step_by_step() -> None:
    comparison = compare_rows(_rows(20, shift=0.25), _rows(12, 0.2, 2 * 10**9))
    assert comparison is not None
    assert (comparison.steps, comparison.at_step) == (12, 7)
    assert comparison.largest_loss_difference == pytest.approx(0.25)
    assert (comparison.speed_ratio, comparison.memory_ratio) == (2.0, 2.0)
    assert comparison_sentence(comparison) == (
        "Against eager: largest loss difference 0.25 (at step 7, of 12 compared), 2.00 x its speed (half of the steps: "
        "2.00 to 2.00), 0.50 x its peak memory. Losses are equal to rounding until step 7, where their relative "
        "difference first exceeds 1e-05 (largest relative difference 0.58)."
    )
    assert compare_rows(_rows(3), []) is None


@pytest.mark.parametrize("steps", [20, 300])
def test_equal_curves_are_both_seen(steps: int) -> None:
    mine, other = Series("this job", "mine", _rows(steps)), Series("all eager", "eager", _rows(steps))
    losses = draw_charts(mine, other)[0].svg
    lines = re.findall(r'<path [^>]*style="fill: none;([^"]*var\(--(?:mine|eager)\)[^"]*)"', losses)
    by_run = {name: [line for line in lines if f"--{name})" in line] for name in ("mine", "eager")}
    assert all("dasharray" not in line for line in by_run["mine"]) and by_run["mine"]
    assert all("dasharray" in line for line in by_run["eager"]) and by_run["eager"], "dashes leave the other line seen"
    assert "opacity" not in losses, "colours that shine through each other mix"


def test_a_loss_that_is_not_a_number_is_the_largest_difference() -> None:
    comparison = compare_rows(_rows(20, shift=math.nan), _rows(20))
    assert comparison is not None
    assert comparison.at_step == 7
    assert math.isnan(comparison.largest_loss_difference)


def test_charts_take_the_pages_colours_and_keep_their_ids_apart() -> None:
    charts = draw_charts(Series("this job", "mine", _rows(20)), Series("all eager", "eager", _rows(20)))
    assert [chart.title for chart in charts] == [
        "Loss",
        "Router loss",
        "Loss difference from eager",
        "Step time",
        "Peak memory",
    ]
    for chart in charts:
        assert chart.svg.startswith("<svg")
        assert "var(--mine)" in chart.svg
        assert "#0" not in chart.svg.replace('"#', "").replace("(#", "")
    assert ("var(--eager)" in charts[0].svg, "var(--eager)" in charts[2].svg) == (True, False)
    ids = [name for chart in charts for name in re.findall(r'\bid="([^"]+)"', chart.svg)]
    assert len(ids) == len(set(ids))
    used = {name for chart in charts for name in re.findall(r'(?:href="|url\()#([^")]+)', chart.svg)}
    assert used <= set(ids)


def test_a_few_slow_steps_do_not_flatten_the_others() -> None:
    rows = _rows(100)
    rows[40]["step_seconds"] = 50.0
    time = next(chart for chart in draw_charts(Series("this job", "mine", rows)) if chart.title == "Step time")
    assert time.note == "milliseconds; above the chart: 1 slow step"


def test_half_of_the_machine_gone_for_both_changes_no_ratio() -> None:
    rows, eager = _rows(40), _rows(40, 0.2)
    for row in (*rows[20:], *eager[20:]):
        row["step_seconds"] *= 7
    comparison = compare_rows(rows, eager)
    assert comparison is not None
    assert comparison.speed_ratio == pytest.approx(2.0)
    assert comparison.speed_quartiles == pytest.approx((2.0, 2.0))


def _loads(count: int, flip: int = 0) -> list[dict[str, Any]]:
    return [{"step": step, "rows": [[3, 1], [2, 2 + (step >= flip > 0)]]} for step in range(1, count + 1)]


def test_a_difference_is_explained_by_the_first_choice_of_a_router_that_flips() -> None:
    flipped = compare_rows(_rows(20, shift=0.25), _rows(20), _loads(20), _loads(20, flip=7))
    assert flipped is not None and flipped.first_flip_at == 7
    assert "equal to rounding until step 7, where a router's choice first flips" in comparison_sentence(flipped)
    before = compare_rows(_rows(20, shift=0.25), _rows(20), _loads(20), _loads(20, flip=9))
    assert before is not None and (before.beyond_rounding_at, before.first_flip_at) == (7, 9)
    assert comparison_sentence(before).endswith("A router's choice first flips at step 9.")
    alike = compare_rows(_rows(20), _rows(20), _loads(20), _loads(20))
    assert alike is not None
    assert "Losses are equal to rounding in all 20 steps" in comparison_sentence(alike)
    rounded = compare_rows(_rows(20, shift=0.003), _rows(20), dtype="bfloat16")
    assert rounded is not None and rounded.beyond_rounding_at == 0


def test_long_lines_are_smoothed_and_every_chart_says_what_it_shows() -> None:
    rows = _rows(300)
    for row in rows:
        row |= {"learning_rate": 1e-3, "grad_norm": 1.0}
    rows += [{"step": step, "validation_loss": 1.0} for step in range(1, 300, 3)]
    short, long = (draw_charts(Series("this job", "mine", some)) for some in (rows[:100], rows))
    assert (short[0].svg.count("opacity: 0.35"), long[0].svg.count("opacity: 0.35")) == (0, 1)
    assert "var(--validation)" in long[0].svg
    assert {"Learning rate", "Gradient norm"} <= {chart.title for chart in long}
    for chart in long:
        assert f'role="img" aria-label="{chart.title}' in chart.svg
    assert "this job from 3 at step 1 to 0.01 at step 300" in long[0].svg
    assert smoothed([(1, 1.0), (2, math.nan), (3, 1.0)]) == [(1, 1.0), (3, 1.0)]


@pytest.mark.parametrize(
    ("ending", "banner"),
    [
        (RunEnding("running"), "Written while the job runs, at step 20 of 50."),
        (RunEnding("interrupted"), "Interrupted after step 20 of 50. Continue it with --resume."),
        (RunEnding("diverged", "step 20: the loss is nan"), "that is not finite: step 20: the loss is nan."),
        (RunEnding("failed", "OSError: disk full"), "ended with an error after step 20 of 50: OSError: disk full"),
        (None, "Not finished: the last row is that of step 20 of 50."),
    ],
    ids=lambda value: getattr(value, "state", None),
)
def test_a_run_that_did_not_finish_says_so_on_top(folder: RunFolder, ending: RunEnding | None, banner: str) -> None:
    folder.job.write_text("train: {steps: 50}", encoding="utf-8")
    write_report(folder, ending)
    assert banner in folder.report.read_text(encoding="utf-8")
    if ending and ending.state != "running":
        write_report(folder)  # as veomni report does, which keeps what is known
        assert json.loads(folder.summary.read_text(encoding="utf-8"))["ending"]["state"] == ending.state


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.outside: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.outside += [value for name, value in attributes if name in ("src", "href") and value and "http" in value]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_one_self_contained_file(folder: RunFolder) -> None:
    write_report(folder)
    page = _Page()
    page.feed(folder.report.read_text(encoding="utf-8"))
    assert page.tags.count("svg") == 5
    assert page.outside == []
    assert not {"script", "link", "img", "iframe"} & {*page.tags}
    for words in (
        "tiny <run>",
        "model: <&>",
        "largest loss difference 0.25",
        "rms_norm_implementation",
        "4 / 5 bound",
        "model.layers.0.<norm>",
        "eager was asked for",
        "veomni_torch.rms_norm:rms_norm",
        "in force: sequence parallelism, Ulysses, sp=2, over sdpa",
    ):
        assert words in page.text
    assert "moe_implementation" not in page.text
    assert [path.name for path in folder.path.iterdir() if path.suffix == ".tmp"] == []


def test_the_summary_and_the_terminal_say_the_same(folder: RunFolder) -> None:
    write_report(folder)
    summary = json.loads(folder.summary.read_text(encoding="utf-8"))
    assert summary["run"]["validation_loss"] == 1.25
    assert summary["comparison"]["speed_ratio"] == 2.0
    assert summary["plan_sha256"] == RECEIPT["plan_sha256"]
    assert {"torch", "transformers", "veomni-core"} <= set(summary["versions"])
    words = describe_run(folder)
    assert "3.0000 -> 0.1500" in words
    assert "2.00 x its speed" in words
    assert words.endswith(f"report: {folder.report}")


def test_a_receipt_of_an_earlier_version_has_a_report_too(folder: RunFolder) -> None:
    earlier = {name: value for name, value in RECEIPT.items() if name != "transformations"}
    folder.receipt.write_text(json.dumps(earlier), encoding="utf-8")
    write_report(folder)
    assert "in force" not in folder.report.read_text(encoding="utf-8")


def test_a_run_without_a_comparison_has_a_report_too(folder: RunFolder) -> None:
    folder.compared("eager").metrics.unlink()
    write_report(folder)
    page = folder.report.read_text(encoding="utf-8")
    assert "Side by side" not in page
    assert "all eager" not in describe_run(folder)
