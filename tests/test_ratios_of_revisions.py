"""What pairs of figures of two revisions say: properties of the ratio, its interval and its verdict."""

from __future__ import annotations

import importlib
import math
import random
import statistics
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def verdict():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT)
        return importlib.import_module("benchmarks.revisions.verdict")


# How long a test takes on a busy machine is not asked.
patiently = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
TIMES = st.floats(1e-6, 1e3)
SAMPLES = st.lists(TIMES, min_size=1, max_size=40)
PAIRS = st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=40)
ENOUGH = st.integers(5, 40)


@patiently
@given(SAMPLES)
def test_equal_figures_are_no_loss(verdict, times):
    found = verdict.ratio(times, times)
    assert (found.median, found.low, found.high) == (1.0, 1.0, 1.0)
    assert found.verdict is (verdict.Verdict.SAME if len(times) >= 5 else verdict.Verdict.UNCLEAR)


@patiently
@given(st.data(), st.lists(st.floats(0.971, 1.029), min_size=5, max_size=40))
def test_noise_within_the_limit_is_no_loss(verdict, data, noise):
    base = data.draw(st.lists(TIMES, min_size=len(noise), max_size=len(noise)))
    head = [time * factor for time, factor in zip(base, noise, strict=True)]
    assert verdict.ratio(base, head).verdict is verdict.Verdict.SAME


@patiently
@given(st.data(), st.floats(1.1, 10.0), ENOUGH)
def test_a_tenth_is_a_loss_and_a_gain_the_other_way_round(verdict, data, slower, pairs):
    """Whatever drifts from pair to pair: each pair has a time of its own, and 3 % of noise on either side."""
    noise = st.lists(st.floats(0.97, 1.03), min_size=pairs, max_size=pairs)
    drift = data.draw(st.lists(TIMES, min_size=pairs, max_size=pairs))
    base = [time * factor for time, factor in zip(drift, data.draw(noise), strict=True)]
    head = [slower * time * factor for time, factor in zip(drift, data.draw(noise), strict=True)]
    assert verdict.ratio(base, head).verdict is verdict.Verdict.LOSS
    assert verdict.ratio(head, base).verdict is verdict.Verdict.GAIN


@patiently
@given(st.data(), ENOUGH)
def test_one_pair_without_a_loss_among_few_keeps_it_from_failing(verdict, data, pairs):
    """The whole range of up to eight pairs must lie beyond the limit."""
    pairs = min(pairs, 8)
    head = data.draw(st.lists(st.floats(1.031, 100.0), min_size=pairs, max_size=pairs))
    head[data.draw(st.integers(0, pairs - 1))] = 1.0
    assert verdict.ratio([1.0] * pairs, head).verdict is verdict.Verdict.UNCLEAR


@patiently
@given(PAIRS)
def test_the_interval_holds_the_median_and_lies_within_the_range(verdict, pairs):
    base, head = zip(*pairs, strict=True)
    ratios = [mine / before for before, mine in pairs]
    found = verdict.ratio(base, head)
    assert min(ratios) <= found.low <= found.median <= found.high <= max(ratios)
    assert found.median == statistics.median(ratios)


@patiently
@given(PAIRS, st.floats(1e-3, 1e3))
def test_neither_the_order_of_pairs_nor_the_unit_of_time_counts(verdict, pairs, unit):
    base, head = zip(*pairs, strict=True)
    found = verdict.ratio(base, head)
    assert verdict.ratio(base[::-1], head[::-1]) == found
    scaled = verdict.ratio([unit * time for time in base], [unit * time for time in head])
    assert (scaled.low, scaled.median, scaled.high) == pytest.approx((found.low, found.median, found.high))


@pytest.mark.parametrize("pairs", [5, 8, 9, 20, 41])
def test_the_interval_misses_the_true_median_as_rarely_as_it_says(verdict, pairs):
    """Counted over noise without a mean, drawn with a seed."""
    drawn = random.Random(0)
    missed = 0
    for _ in range(2000):
        ratios = [math.exp(math.tan(math.pi * (drawn.random() - 0.5)) / 50) for _ in range(pairs)]
        found = verdict.ratio([1.0] * pairs, ratios)
        missed += not found.low <= 1 <= found.high
    assert missed / 2000 < 1 / 16 + 0.015  # three standard deviations of 2000 draws


def test_noise_of_five_percent_alone_seldom_fails(verdict):
    drawn = random.Random(0)
    found = [
        verdict.ratio(*([drawn.lognormvariate(0, 0.05) for _ in range(5)] for _ in range(2))).verdict
        for _ in range(2000)
    ]
    assert found.count(verdict.Verdict.LOSS) < 0.01 * len(found)


def test_more_pairs_make_the_same_noise_clear(verdict):
    """Three outliers leave five or eight pairs unclear, and thirty are told apart from them."""
    few, many = [1.2, *[1.0] * 7], [*[1.2] * 3, *[1.0] * 27]
    assert verdict.ratio([1.0] * 8, few).verdict is verdict.Verdict.UNCLEAR
    assert verdict.ratio([1.0] * 30, many).verdict is verdict.Verdict.SAME


def test_fewer_than_five_pairs_say_nothing(verdict):
    assert verdict.ratio([1.0] * 4, [2.0] * 4).verdict is verdict.Verdict.UNCLEAR
    assert verdict.ratio([1.0] * 5, [2.0] * 5).verdict is verdict.Verdict.LOSS


@pytest.mark.parametrize("head, said", [(0, "SAME"), (64, "LOSS")])
def test_a_call_that_held_nothing(verdict, head, said):
    assert verdict.ratio([0] * 5, [head] * 5).verdict is verdict.Verdict[said]
