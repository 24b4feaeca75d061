"""What the fuzzing tests share: how many examples they run, which errors may end one, and values that YAML can hold.

The examples are derived from each test's code, so that every run tries the same ones and CI can be repeated.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from veomni_core.errors import VeOmniError

_NOT_OURS = (HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.filter_too_much)


def bounded(examples: int) -> settings:
    """Run ``examples`` examples, the same in each run, however long one takes."""
    return settings(max_examples=examples, derandomize=True, database=None, suppress_health_check=_NOT_OURS)


@contextmanager
def typed_errors() -> Iterator[None]:
    """Within it, an error of the project may end the code, and any other one fails the test.

    Its message must be printable, and say something.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except VeOmniError as error:
            said = str(error)
        else:
            return
    assert said.strip() and said.encode()


# Beside what hypothesis finds itself: what was misread before, or is special to YAML, to paths or to numbers.
ODD_TEXTS = st.sampled_from(
    [
        "",
        " ",
        "auto",
        "eager",
        "default",
        "~",
        "~nobody-here/x",
        "\0",
        "a\0.json",
        "[",
        "*.layers.*",
        "**",
        "..",
        "/",
        "é",
    ]
)
TEXTS = st.text(max_size=12) | ODD_TEXTS
NUMBERS = st.integers() | st.sampled_from([0, -1, 10**30, 2**64]) | st.floats()
SCALARS = st.none() | st.booleans() | NUMBERS | TEXTS | st.dates()
KEYS = TEXTS | st.integers(-2, 2) | st.none() | st.booleans()
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=6
)
