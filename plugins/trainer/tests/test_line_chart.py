"""The report's line charts: the numbers beside their axes, and where lines, dots and labels lie."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from veomni_trainer.report.line_chart import Line, draw_lines
from veomni_trainer.report.scale import Scale

SVG = "{http://www.w3.org/2000/svg}"
ROW = [(step, 1.0) for step in range(1, 11)]


def drawn(*lines: Line, top: float | None = None) -> ElementTree.Element:
    return ElementTree.fromstring(draw_lines("loss", lines, 'a "b" & <c>', top))


def strokes(svg: ElementTree.Element, colour: str) -> list[list[list[tuple[float, float]]]]:
    """The pieces of each line of a colour, as places."""
    own = [path.attrib["d"] for path in svg.iter(f"{SVG}path") if f"var(--{colour})" in path.attrib["style"]]
    number = r"(-?[\d.]+) (-?[\d.]+)"
    return [[[(float(x), float(y)) for x, y in re.findall(number, part)] for part in d[1:].split("M")] for d in own]


def texts(svg: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in svg.iter(f"{SVG}text")]


@pytest.mark.parametrize(
    ("low", "high", "whole", "wanted"),
    [
        (0.0, 35.0, False, "0 5 10 15 20 25 30 35"),
        (1.9, 2.1, False, "1.900 1.925 1.950 1.975 2.000 2.025 2.050 2.075 2.100"),
        (-1.2, 0.7, False, "-1.00 -0.75 -0.50 -0.25 0 0.25 0.50"),
        (0.00001, 0.00004, False, "1.0e-5 1.5e-5 2.0e-5 2.5e-5 3.0e-5 3.5e-5 4.0e-5"),
        (2e6, 9e6, False, "2e6 3e6 4e6 5e6 6e6 7e6 8e6 9e6"),
        (1.0, 1.0000007, False, " ".join(f"1.000000{digit}" for digit in range(8))),
        (0.8, 3.2, True, "1 2 3"),
        (0.0, 18.0, True, "0 5 10 15"),
    ],
)
def test_ticks_are_round_numbers_in_one_form(low: float, high: float, whole: bool, wanted: str) -> None:
    ticks = Scale(low, high, 0.0, 100.0).ticks(8, whole)
    assert " ".join(text for _, text in ticks) == wanted
    assert [float(text) for _, text in ticks] == pytest.approx([value for value, _ in ticks], rel=1e-9, abs=1e-12)


@given(st.lists(st.floats(), max_size=9) | st.lists(st.integers(0, 10**9), max_size=9))
def test_any_values_have_a_scale_with_a_few_ticks_on_it(values: list[float]) -> None:
    scale = Scale.over(values, 10.0, 90.0)
    assert scale.low < scale.high
    ticks = scale.ticks(8, whole=all(isinstance(value, int) for value in values))
    assert len(ticks) <= 9
    assert all(10.0 - 1e-3 <= scale.at(value) <= 90.0 + 1e-3 for value, _ in ticks)
    draw_lines("loss", [Line([*enumerate(values)], "mine", 1.0)], "")


def test_a_line_has_a_gap_at_what_is_no_number_and_a_dot_between_two_gaps() -> None:
    values = [1.0, 2.0, math.nan, 3.0, math.inf, 2.0, 1.0]
    svg = drawn(Line([*enumerate(values, 1)], "mine", 1.6))
    ((left, right),) = strokes(svg, "mine")
    assert (len(left), len(right)) == (2, 2)
    (dot,) = svg.iter(f"{SVG}circle")
    assert left[-1][0] < float(dot.attrib["cx"]) < right[0][0]
    assert float(dot.attrib["cy"]) < min(y for _, y in left + right)  # 3 is the highest


def test_values_lie_where_the_ticks_say() -> None:
    svg = drawn(Line([(1, 0.0), (2, 10.0), (3, 5.0)], "mine", 1.6), top=20.0)
    (((_, zero), (_, ten), (_, five)),) = strokes(svg, "mine")[0:1][0]
    labels = {text.text: float(text.attrib["y"]) - 3.5 for text in svg.iter(f"{SVG}text") if text.get("text-anchor")}
    assert (zero, ten) == pytest.approx((labels["0"], labels["10.0"]), abs=0.11)
    assert five == pytest.approx((zero + ten) / 2, abs=0.11)
    assert "20.0" in labels  # the end that was given


def test_of_very_many_points_the_extremes_are_kept() -> None:
    points = [(step, 1.0 + (step == 70_000) - (step == 20_000)) for step in range(100_000)]
    svg = drawn(Line(points, "mine", 0.6))
    ((line,),) = strokes(svg, "mine")
    assert len(line) < 4000
    heights = sorted(y for _, y in line)
    assert heights[0] < heights[1] - 50 and heights[-1] > heights[-2] + 50
    assert [x for x, _ in line] == sorted(x for x, _ in line)


@pytest.mark.parametrize(("rising", "left"), [(True, True), (False, False)])
def test_the_legend_is_where_it_hides_no_line(rising: bool, left: bool) -> None:
    points = [(step, float(step if rising else -step)) for step in range(10)]
    svg = drawn(Line(points, "eager", 4.0, "all <eager>"), Line(points, "mine", 1.6, "this job"))
    places = {text.text: text.attrib for text in svg.iter(f"{SVG}text")}
    label = places["all <eager>"]
    assert float(label["y"]) < 97 and (float(label["x"]) < 200) is left
    assert "this job" not in texts(drawn(Line(points, "mine", 1.6, "this job")))  # of one line the title says it


def test_later_lines_are_above_and_each_has_its_looks() -> None:
    lines = Line(ROW, "eager", 4.0), Line(ROW, "mine", 0.6, opacity=0.35), Line(ROW, "validation", 1.0, radius=2.5)
    svg = drawn(*lines)
    assert svg.attrib["aria-label"] == 'a "b" & <c>'
    group = svg.find(f"{SVG}g")
    assert group is not None and group.attrib["clip-path"] == "url(#loss-axes)"
    styles = [path.attrib["style"] for path in group.iter(f"{SVG}path")]
    assert [re.findall(r"--(\w+)\); stroke-width: ([\d.]+)", style)[0] for style in styles] == [
        ("eager", "4.0"),
        ("mine", "0.6"),
        ("validation", "1.0"),
    ]
    assert ["opacity: 0.35" in style for style in styles] == [False, True, False]
    assert len([*group.iter(f"{SVG}circle")]) == len(ROW)
