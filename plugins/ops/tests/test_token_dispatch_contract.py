"""The contract of token_dispatch: what several processes check together, and the faults that they find."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from planted_faults import failures_of
from torch import distributed as dist

from veomni_ops.catalog import OPS
from veomni_ops.contract import Sample, contract_for
from veomni_ops.expert_ranks import ExpertRanks
from veomni_ops.token_dispatch import exchanged


def _failures(kernel, dtype="float32", **options):
    return failures_of(kernel, "token_dispatch", "exchanged", dtype, **options)


def forgets_weights_gradient(hidden, top_k_index, top_k_weights, experts, ranks):
    return exchanged(hidden, top_k_index, top_k_weights.detach(), experts, ranks)


@pytest.mark.thorough
def test_a_forgotten_gradient_of_the_routing_weights_is_found():
    failures = _failures(forgets_weights_gradient)
    assert "sample 'odd counts': rank 2: misses the gradient of top_k_weights" in failures


class _SumsInSteps(torch.autograd.Function):
    """The sum over ranks in the values' own dtype, rank by rank."""

    @staticmethod
    def forward(ctx, partial, group):
        every = [torch.empty_like(partial) for _ in range(group.size())]
        dist.all_gather(every, partial.contiguous(), group=group)
        return sum(every[1:], every[0])

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def sums_in_16_bits(hidden, top_k_index, top_k_weights, experts, ranks):
    """Right but for where partial sums are added up: on a batch that all ranks get."""

    def local_sums(rows, index, weights):
        return _SumsInSteps.apply(experts(rows, index, weights), ranks.group) / ranks.size

    return exchanged(hidden, top_k_index, top_k_weights, local_sums, ranks)


@pytest.mark.thorough
def test_partial_sums_that_are_added_up_in_16_bits_are_found():
    failures = _failures(sums_in_16_bits, "bfloat16")
    assert any("'partial sums that cancel': rank 0: the result is off" in failure for failure in failures), failures


def loses_tokens(hidden, top_k_index, top_k_weights, experts, ranks):
    """Leaves out the experts, and so their gradients, where a rank gets nothing."""

    def unless_empty(rows, index, weights):
        nothing = bool((index >= ranks.local_experts).all())
        return torch.zeros_like(rows) if nothing else experts(rows, index, weights)

    return exchanged(hidden, top_k_index, top_k_weights, unless_empty, ranks)


@pytest.mark.thorough
def test_a_rank_that_gets_nothing_and_leaves_its_experts_out_is_found():
    failures = _failures(loses_tokens)
    assert "sample 'a rank that gets no row': rank 0: misses the gradient of hidden" in failures


def combines_in_another_order(hidden, top_k_index, top_k_weights, experts, ranks):
    return exchanged(hidden, top_k_index, top_k_weights, experts, ranks).flip(0)


@pytest.mark.thorough
def test_rows_that_come_back_in_another_order_are_found():
    assert any("'odd counts': rank 0: the result is off" in failure for failure in _failures(combines_in_another_order))


def takes_its_number_in_the_world(hidden, top_k_index, top_k_weights, experts, ranks):
    own = replace(ranks, rank=dist.get_rank() % ranks.size)
    return exchanged(hidden, top_k_index, top_k_weights, experts, own)


_last = {}


class _Forgets(torch.autograd.Function):
    """The identity, whose backward multiplies by what the last forward was called with."""

    @staticmethod
    def forward(ctx, hidden, factor):
        _last["factor"] = factor
        return hidden.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (1 + _last["factor"]), None


def reads_the_last_forward_in_backward(hidden, top_k_index, top_k_weights, experts, ranks):
    at = top_k_index[:1].sum().float()
    hidden = _Forgets.apply(hidden, at)
    return exchanged(
        hidden / (1 + at) + (hidden - hidden / (1 + at)).detach(), top_k_index, top_k_weights, experts, ranks
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    "kernel, words",
    [
        (takes_its_number_in_the_world, "'a rank without tokens': rank"),
        (reads_the_last_forward_in_backward, "where another layer's forward runs before its backward"),
    ],
)
def test_what_a_rank_keeps_of_the_world_or_of_another_layer_is_found(kernel, words):
    assert any(words in failure for failure in _failures(kernel, deterministic=True)), _failures(kernel)


def raises_on_one_rank(hidden, top_k_index, top_k_weights, experts, ranks):
    if ranks.rank == 1:
        raise ValueError("no room for 7 tokens")
    return exchanged(hidden, top_k_index, top_k_weights, experts, ranks)


@pytest.mark.thorough
def test_a_rank_that_raises_ends_the_check_with_its_message():
    failures = _failures(raises_on_one_rank)
    assert "sample 'odd counts': rank 1: raised ValueError: no room for 7 tokens" in failures


def test_the_whole_computation_is_the_sum_over_all_ranks_experts():
    (op,) = [op for op in OPS if op.name == "token_dispatch"]
    contract = contract_for(op, "exchanged")
    eye = torch.eye(2).repeat(1, 1, 1)
    index = torch.tensor([[0, 1]])
    calls = [Sample("", (torch.ones(1, 2), index, torch.tensor([[1.0, 10.0]]), factor * eye)) for factor in (1, 3)]
    assert [result.tolist() for result in contract.whole(calls)] == [[[31.0, 31.0]]] * 2


def test_a_kernel_learns_its_place_among_the_ranks():
    seen = []
    sample = Sample("", (torch.ones(3, 2), torch.zeros(3, 1, dtype=torch.long), torch.ones(3, 1), torch.ones(4, 2, 2)))

    class Group:
        def size(self):
            return 8

        def rank(self):
            return 5

    (op,) = [op for op in OPS if op.name == "token_dispatch"]
    group = Group()
    contract_for(op, "exchanged").call(lambda *args: seen.append(args[4]), sample, group)
    assert seen == [ExpertRanks(group, 8, 5, 4)]
