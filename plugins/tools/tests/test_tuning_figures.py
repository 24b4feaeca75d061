"""The figures of a tuning: times in turns, peaks of memory, and by how much a kernel won."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from veomni_tools.profiles.profile import Contender, MeasuredSite, Times, best
from veomni_tools.profiles.site_kind import SiteKind
from veomni_tools.tuning.clock import Turns, times_in_turns
from veomni_tools.tuning.peak_memory import peak_bytes
from veomni_tools.tuning.report import Outcome


class _Script:
    """A step whose times are written down."""

    def __init__(self, *times):
        self.times, self.order = list(times), []

    def run(self):
        return None

    def in_place(self):
        return torch.no_grad()


def test_contenders_take_turns_and_times_are_medians_with_their_spread():
    order = []

    class Clock:
        def milliseconds(self, call, calls):
            step = call.__self__
            order.append(step)
            return step.times.pop(0) * calls

    one, two = _Script(8.0, 10.0, 30.0, 20.0), _Script(8.0, 5.0, 5.0, 5.0)
    found = times_in_turns({"one": one, "two": two}, Clock(), Turns(least=3, most=3, seconds=0.0))
    assert order == [one, two, one, two, two, one, one, two]  # the first two say how long a reading is
    assert (found["one"].median, found["two"].median) == (20.0, 5.0)
    assert found["one"].low == pytest.approx(14.0) and found["one"].high == pytest.approx(26.0)
    assert best_of(found) == "two"


def best_of(times):
    return best([Contender(name, times=each) for name, each in times.items()]).kernel


def test_the_peak_is_what_a_call_holds_at_once():
    held = peak_bytes(lambda: [torch.ones(1000) for _ in range(3)], torch.device("cpu"))
    assert held == 3 * 4000
    one_after_the_other = peak_bytes(lambda: [torch.ones(1000).sum() for _ in range(3)], torch.device("cpu"))
    assert 4000 <= one_after_the_other < 2 * 4000


def outcome(by_rank, *times):
    contenders = tuple(Contender(name, times=Times(ms, ms, ms), peak_bytes=memory) for name, ms, memory in times)
    site = MeasuredSite(SiteKind("rms_norm", "standard", "norm", (), (), (), "eager"), 2, "a norm", "", contenders)
    return Outcome(site, by_rank, site.measured)


def test_the_table_says_by_how_much_it_won():
    three = (("a", 1.0, 9), ("b", 1.5, 5), ("c", 3.0, 1))
    assert outcome("a", *three).sentence() == "a; 1.50x as fast as b; as by rank"
    assert outcome("b", *three).sentence() == "a; 1.50x as fast as b, the choice by rank"
    assert outcome("c", *three).sentence() == "a; 1.50x as fast as b; 3.00x as fast as c, the choice by rank"
    assert outcome("d", *three).sentence() == "a; 1.50x as fast as b; by rank d, which was not measured"
    assert outcome("c", *three).saved_ms == 4.0 and outcome("d", *three).saved_ms == 0.0
    tied = outcome("a", ("a", 1.0, 9), ("b", 1.0, 5))
    assert (
        tied.sentence() == "b; within the spread of a, and 5 B in place of 9 B; 1.00x as fast as a, the choice by rank"
    )
    assert outcome("b", ("b", 1.0, 5)).sentence() == "b; as by rank"
    shy = replace(outcome("b", *three), able=outcome("b", *three).able[1:])  # auto never takes the fastest
    assert shy.sentence() == "b; 2.00x as fast as c; as by rank"
    assert outcome("a").sentence() == "not measured, so a by rank"
