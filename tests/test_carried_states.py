"""Which modules carry something from one position to the next, read once for each class."""

from __future__ import annotations

import pytest

from hybrid_models import hybrid
from veomni_transformers.packed.carried_states import carries_inputs, carries_state, carrying_paths


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2", "inkling_text"])
def test_the_paths_are_those_of_the_modules_that_carry_a_state_or_inputs(family):
    model = hybrid(family)
    states = [path for path, module in model.named_modules() if carries_state(module)]
    inputs = [path for path, module in model.named_modules() if carries_inputs(module)]
    assert bool(states) == (family == "qwen3_next") and inputs
    assert set(carrying_paths(model)) == {*states, *inputs}
