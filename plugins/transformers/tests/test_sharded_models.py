"""Kernels bound on models that transformers' distributed engine has sharded: the numbers of one process.

One launch of processes runs every model and layout and prints a line of JSON for each. The tests read those lines.
"""

from __future__ import annotations

import json

import pytest

from distributed import once_for_all_workers, run_ranks
from sharded_models import FAMILIES, LAYOUTS, STEPS, has_layout

pytest.importorskip(
    "transformers.distributed.expert_parallel", reason="transformers has a distributed engine since 5.21"
)

# Of each element of the gradients, and relative of losses and norms: float32 sums in another order. The largest that is
# found is 3.4e-7, and 6e-8 of a weight after the six steps.
LARGEST = 1e-6
LARGEST_OF_WEIGHTS = 3e-7

RUN = """
    from sharded_models import report_cases
    report_cases({folder!r}, {processes}, {families})
"""
# No experts, experts as most models have them, and experts with biases.
FEW = ("llama", "qwen3_moe", "gpt_oss")
CASES = [
    pytest.param(
        processes,
        family,
        name,
        id=f"{family}, {name}",
        marks=[pytest.mark.thorough] * (processes > 2 or family not in FEW),
    )
    for processes in LAYOUTS
    for family in FAMILIES
    for name, layout in LAYOUTS[processes].items()
    if has_layout(family, layout)
]


@pytest.fixture
def reported(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, processes: int, family: str, name: str
) -> list[dict]:
    """What each rank reports of one model and layout."""
    selected = [item.callspec.params for item in request.session.items if item.path == request.path]
    families = [each for each in FAMILIES if any(params["family"] == each for params in selected)]

    def run() -> list[list[dict]]:
        folder = tmp_path_factory.mktemp("models")
        outputs = run_ranks(
            RUN.format(folder=str(folder), processes=processes, families=families), processes, timeout=600.0
        )
        lines = [[json.loads(line) for line in output.splitlines()] for output in outputs]
        return [list(each) for each in zip(*lines, strict=True)]

    cases = once_for_all_workers(tmp_path_factory, f"sharded_models_{processes}", run)
    return next(each for each in cases if (each[0]["family"], each[0]["layout"]) == (family, name))


@pytest.mark.parametrize("processes, family, name", CASES)
def test_a_bound_sharded_model_gives_the_losses_and_gradients_of_one_process(reported):
    for rank in reported:
        assert rank["losses_off"] < LARGEST, rank
        assert rank["norms_off"] < LARGEST, rank
        assert rank["gradients_off"][1] < LARGEST, rank
        assert rank["gradients_off_in_norm"] < LARGEST, rank
        assert rank["logits_off"] < LARGEST, rank
        assert rank["weights_off"][1] < LARGEST_OF_WEIGHTS, rank
        assert rank["changed"] == {}


@pytest.mark.parametrize("processes, family, name", CASES)
def test_every_kernel_ran_and_the_plan_was_known_before_there_were_ranks(reported):
    for rank in reported:
        assert rank["planned_differently"] == []
        assert rank["divided_as_planned"], rank
        # Each site calls its kernel once in a step, so one that the engine's forward missed shows.
        assert rank["called"] == {op: STEPS * sites for op, sites in rank["bound"].items()}, rank
        assert rank["same_bits_after_undo"]
        assert rank["globals_changed"] == []
