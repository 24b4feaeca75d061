"""Faults that kernels of native sparse attention may have, each caught by the contract."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from planted_faults import assert_caught

from veomni_ops import native_sparse as ops

chosen_blocks, places_of = ops.chosen_blocks, ops.Places.of
NAMES = ("query", "key", "value", "compressed_key", "compressed_value", "gates")


def choosing(choose, name):
    def kernel(*call, **options):
        with patch.object(ops, "chosen_blocks", choose):
            return ops.native_sparse(*call, **options)

    kernel.__name__ = name
    return kernel


def _twice(*call):
    chosen = chosen_blocks(*call)
    return torch.cat([chosen[..., :1], chosen[..., :-1]], -1)


def _later(weights, places, blocks, sizes):
    order = ops.block_scores(weights, places, blocks, sizes).flip(-1).argsort(dim=-1, descending=True, stable=True)
    order = blocks - 1 - order[..., : sizes.block_count]
    return torch.where(order <= places.block[:, None, None], order, -1).int()


def _of_the_best_key_alone(weights, *others):
    return chosen_blocks(torch.where(weights == weights.amax(-1, keepdim=True), weights, 0.0), *others)


a_block_twice, later_blocks_win_ties = choosing(_twice, "a_block_twice"), choosing(_later, "later_blocks_win_ties")
of_the_best_key_alone = choosing(_of_the_best_key_alone, "of_the_best_key_alone")


def placed(changes, name):
    def kernel(*call, **options):
        with patch.object(ops.Places, "of", lambda *given: changes(places_of(*given))):
            return ops.native_sparse(*call, **options)

    kernel.__name__ = name
    return kernel


def _early(places):
    return replace(places, compressed_stop=places.compressed_stop + 1)


def _packed(places):
    return replace(places, sequence=torch.zeros_like(places.sequence))


keys_that_are_not_complete = placed(_early, "keys_that_are_not_complete")
across_packed_sequences = placed(_packed, "across_packed_sequences")


def a_longer_window(*call, window, **options):
    return ops.native_sparse(*call, window=window + 1, **options)


def without_gradient(name):
    def kernel(*call, **options):
        given = [x.detach() + 0 * x if each == name else x for each, x in zip(NAMES, call, strict=True)]
        return ops.native_sparse(*given, **options)

    kernel.__name__ = f"without_gradient_of_{name}"
    return kernel


without_gradient_of_gates, without_gradient_of_compressed_key = map(without_gradient, ("gates", "compressed_key"))
FAULTS = {
    a_block_twice: "result",
    later_blocks_win_ties: "result",
    of_the_best_key_alone: "result",
    keys_that_are_not_complete: "result",
    across_packed_sequences: "result",
    a_longer_window: "result",
    without_gradient_of_gates: "the gradient of gates",
    without_gradient_of_compressed_key: "the gradient of compressed_key",
}


@pytest.mark.parametrize("kernel", FAULTS, ids=lambda kernel: kernel.__name__)
def test_another_attention_is_caught(kernel):
    assert_caught(kernel, FAULTS[kernel], op="attention", variant="native_sparse")


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"compressed_key": (1, 3, 2, 8)}, r"compressed_key is \[1, 3, 2, 8\]; give \[1, 1, 2, 8\]"),
        ({"gates": (1, 40, 3, 3)}, r"gates is \[1, 40, 3, 3\]; give \[1, 40, 4, 3\]"),
        ({"query": (1, 9, 4, 8)}, r"key is \[1, 40, 2, 8\]; give \[1, 9, 2, 8\]"),  # as beside a cache
        ({"key": (1, 40, 3, 8)}, "H a multiple of G"),
    ],
)
def test_what_does_not_fit_is_refused(changes, words):
    shapes = {"query": (1, 40, 4, 8), "key": (1, 40, 2, 8), "value": (1, 40, 2, 8)}
    shapes |= {"compressed_key": (1, 1, 2, 8), "compressed_value": (1, 1, 2, 8), "gates": (1, 40, 4, 3), **changes}
    with pytest.raises(ValueError, match=words):
        ops.native_sparse(*(torch.zeros(shapes[name]) for name in NAMES))
