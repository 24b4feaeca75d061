"""The list of planted faults fits the sources of today, and the page has each of them."""

from __future__ import annotations

from collections import Counter

from faults.listed import faults
from faults.page import page
from faults.results import read

LISTED = faults()


def test_every_fault_can_be_planted() -> None:
    assert [problem for fault in LISTED for problem in fault.problems()] == []


def test_there_are_enough_and_each_has_a_name_of_its_own() -> None:
    assert len(LISTED) >= 66
    assert [name for name, count in Counter(fault.name for fault in LISTED).items() if count > 1] == []


def test_the_page_is_what_the_runs_found() -> None:
    text = page()
    assert [fault.name for fault in LISTED if f"`{fault.name}`" not in text] == []
    assert f"Of {len(LISTED)} mistakes, {len(LISTED)} are caught by `make test`." in text


def test_results_are_of_faults_that_are_listed() -> None:
    assert read().keys() <= {fault.name for fault in LISTED}
