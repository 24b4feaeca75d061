"""The reference of routers: what is chosen, with which weights, and what ties and given experts do."""

from __future__ import annotations

import pytest
import torch

from veomni_ops.router import LARGEST, SCORES, TOP_TWO, route

LOGITS = torch.randn(11, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def chosen_one_by_one(by, count):
    """Of equal ones the first."""
    return [sorted(range(len(row)), key=lambda e, row=row: (-row[e], e))[:count] for row in by.tolist()]


@pytest.mark.parametrize("variant", SCORES)
@pytest.mark.parametrize("normalize", [False, True])
def test_weights_are_scores_of_the_chosen(variant, normalize):
    bias = torch.randn(8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    weights, experts = route(LOGITS, 3, bias, variant=variant, normalize=normalize, scale=2.5)
    scores = {"softmax": LOGITS.exp() / LOGITS.exp().sum(1, True), "sigmoid": 1 / (1 + (-LOGITS).exp())}
    scores["root_softplus"] = (1 + LOGITS.exp()).log() ** 0.5
    assert experts.tolist() == chosen_one_by_one(scores[variant] + bias, 3)
    wanted = scores[variant].gather(1, experts)
    wanted = 2.5 * (wanted / wanted.sum(1, True) if normalize else wanted)
    torch.testing.assert_close(weights, wanted, rtol=1e-12, atol=0.0)


def test_a_softmax_of_the_chosen_logits_is_a_normalized_softmax():
    weights, experts = route(LOGITS, 3, variant="softmax", normalize=True)
    torch.testing.assert_close(weights, LOGITS.gather(1, experts).softmax(1), rtol=1e-12, atol=0.0)


def test_of_equal_scores_the_first_is_chosen_wherever_the_row_is():
    logits = torch.tensor([1.0, 3.0, 3.0, 0.0, 3.0, 1.0])
    for rows in (1, 2, 33, 512):
        _, experts = route(logits.repeat(rows, 1), 4, variant="sigmoid")
        assert experts.tolist() == [[1, 2, 4, 0]] * rows
    assert route(torch.zeros(2, 5), 5, variant="softmax")[1].tolist() == [[0, 1, 2, 3, 4]] * 2


@pytest.mark.parametrize("by", [TOP_TWO, LARGEST])
def test_groups_are_chosen_first(by):
    _, experts = route(LOGITS, 3, variant="sigmoid", groups=4, kept_groups=2, group_score=by)
    pairs = LOGITS.sigmoid().view(11, 4, 2)
    groups = chosen_one_by_one(pairs.sum(2) if by == TOP_TWO else pairs.amax(2), 2)
    for row, kept in enumerate(groups):
        allowed = [e for e in range(8) if e // 2 in kept]
        assert experts[row].tolist() == sorted(allowed, key=lambda e, row=row: -LOGITS[row, e])[:3]
    assert route(LOGITS, 3, variant="sigmoid", groups=1)[1].tolist() != experts.tolist()


def test_given_experts_get_their_own_scores_and_gradients_and_rows_of_minus_1_choose():
    logits = LOGITS.clone().requires_grad_()
    given = torch.tensor([[7, 0]]).repeat(11, 1)
    given[3] = -1
    weights, experts = route(logits, 2, variant="softmax", groups=4, kept_groups=1, chosen=given)
    free, own = route(logits, 2, variant="softmax", groups=4, kept_groups=1)
    assert experts[3].equal(own[3]) and weights[3].equal(free[3]) and experts[0].tolist() == [7, 0]
    weights[:, 0].log().sum().backward()
    wanted = -LOGITS.softmax(1)  # of the logarithm of a softmax
    wanted[torch.arange(11), experts[:, 0]] += 1
    torch.testing.assert_close(logits.grad, wanted, rtol=1e-10, atol=1e-12)
