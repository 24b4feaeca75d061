"""Ulysses and rings over two and four processes (gloo): exact, undone without a trace, refused where wrong."""

from __future__ import annotations

import ast
from collections.abc import Callable

import pytest
import ring_models
import torch
import ulysses_bound
import ulysses_groups
import ulysses_hybrids
import ulysses_models
import ulysses_multimodal
import ulysses_overlap
import ulysses_pieces
import ulysses_refusals
from ulysses_ranks import CHECKS

from distributed import once_for_all_workers, run_ranks
from veomni_core.errors import HostError
from veomni_transformers.sequence import apply_ulysses
from veomni_transformers.sequence.recurrence import _after, _joined

MODULES = (ulysses_pieces, ulysses_models, ulysses_multimodal, ulysses_overlap, ulysses_hybrids, ulysses_groups)
MODULES += (ulysses_refusals, ulysses_bound, ring_models)
NAMES = [name for module in MODULES for name, check in CHECKS.items() if check.__module__ == module.__name__]

# Gradients of weights and of the loss, a kernel with an option, pictures, exchanges that overlap, a hybrid, a ring,
# refusals; `make test-all` runs every check.
FEW = (
    "llama_with_as_many_key_heads_as_ranks_or_fewer",
    "heads_of_several_dtypes_have_those_of_queries",
    "weights_in_float32_under_autocast",
    "a_kernel_that_takes_lengths_and_sinks",
    "features_of_early_layers_are_added_on_the_rank_of_their_positions",
    "what_towers_were_given_is_not_passed_on",
    "pictures_of_several_sizes_on_their_ranks",
    "each_rank_runs_towers_on_its_part",
    "overlapping_exchanges_change_no_bit_of_a_loss",
    "exchanges_are_under_way_while_others_are_projected",
    "attention_whose_exchanges_cannot_overlap_is_refused",
    "attention_dropout_is_refused",
    "a_decay_keeps_its_precision_and_a_value_head_its_key",
    "a_hybrid_that_is_packed_or_padded",
    "lightning_attention_is_refused",
    "a_ring_computes_windows_softcaps_sinks_and_packed_rows",
    "a_ring_with_packed_hybrids",
    "what_a_ring_would_compute_wrongly_is_refused",
)


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int, str], dict[str, str]]:
    """What each selected check of a module found on so many processes, from one start of them for all of it."""
    items = [item for item in request.session.items if getattr(item, "function", None) is test_on_several_processes]

    def run(processes: int, module: str) -> dict[str, str]:
        selected = [item.callspec.params for item in items]
        names = [each["name"] for each in selected if each["processes"] == processes]
        names = [name for name in names if CHECKS[name].__module__ == module]
        try:
            outputs = run_ranks(f"import {module}, ulysses_ranks; ulysses_ranks.run({names})", processes)
        except AssertionError as error:  # kept: the next test would wait for the same
            return dict.fromkeys(names, f"{error}")
        return dict(ast.literal_eval(line) for line in outputs[0].splitlines() if line.startswith("("))

    def outcomes_on(processes: int, module: str) -> dict[str, str]:
        return once_for_all_workers(tmp_path_factory, f"{module}_{processes}", lambda: run(processes, module))

    return outcomes_on


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FEW else pytest.mark.thorough) for name in NAMES]
)
@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_on_several_processes(outcomes, processes, name):
    assert outcomes(processes, CHECKS[name].__module__)[name] == ""


def test_without_a_process_group_it_says_what_to_call():
    with pytest.raises(HostError, match=r"call torch\.distributed\.init_process_group\(\) first"):
        apply_ulysses(torch.nn.Linear(1, 1))


def test_positions_before_a_part_leave_channels_adjacent_forth_and_back():
    x, before = torch.randn(2, 9, 5).transpose(1, 2).requires_grad_(), torch.randn(2, 5, 3)
    y = _joined([before, x])
    assert y.equal(torch.cat([before, x], -1)) and y.stride(1) == 1
    strides: list[int] = []
    y.register_hook(lambda gradient: strides.append(gradient.stride(1)))
    part = _after(y, 3)
    assert part.equal(x) and part.stride(1) == 1
    part.backward(torch.randn(2, 9, 5).transpose(1, 2))
    assert strides == [1]
    assert _joined([before, x.contiguous()]).is_contiguous()
