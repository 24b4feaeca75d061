"""The chunked losses beyond their contracts: any number of tokens, what is computed and held, and rounding."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from leaves import leaf
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from veomni_ops import cross_entropy_loss
from veomni_torch import cross_entropy_loss as chunked
from veomni_torch import logit_chunks
from veomni_torch import vocabulary_parallel_loss as sharded
from veomni_torch.logit_chunks import chunks


@given(tokens=st.integers(0, 400), ignored=st.integers(0, 400), seed=st.integers(0, 100))
@example(tokens=129, ignored=0, seed=0)  # the last chunk has one token
@settings(max_examples=30)
def test_chunk_loss_for_any_number_of_tokens(tokens, ignored, seed):
    torch.manual_seed(seed)
    hidden, weight, labels = leaf(tokens, 8), leaf(13, 8), torch.randint(13, (tokens,))
    labels[:ignored] = -100
    with mock.patch.object(logit_chunks, "CPU_CHUNK_BYTES", 0):  # so that a chunk has 128 rows, the fewest
        found = chunked.causal(hidden, weight, labels)
    wanted = cross_entropy_loss.causal(hidden, weight, labels)
    torch.testing.assert_close(found, wanted)
    pairs = zip(
        torch.autograd.grad(found, (hidden, weight)), torch.autograd.grad(wanted, (hidden, weight)), strict=True
    )
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.gpu
def test_a_factor_of_the_loss_is_not_rounded_to_the_gradients_dtype():
    torch.manual_seed(0)
    hidden, weight = (torch.randn(rows, 8, device="cuda").bfloat16().requires_grad_() for rows in (40, 11))
    loss = chunked.causal(hidden, weight, torch.arange(40, device="cuda") % 11)
    (whole,) = torch.autograd.grad(loss, weight, retain_graph=True)
    (part,) = torch.autograd.grad(loss / 8191, weight)
    factor = torch.ones((), device="cuda") / 8191
    assert torch.equal(part, (whole.float() * factor).bfloat16())


def test_chunk_loss_takes_no_gradients_where_none_are_wanted():
    hidden, weight, labels = leaf(300, 8), leaf(11, 8), torch.arange(300) % 11
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile, torch.no_grad():
        loss = chunked.causal(hidden, weight, labels)
    torch.testing.assert_close(loss, cross_entropy_loss.causal(hidden, weight, labels).detach())
    products = sum(event.count for event in profile.key_averages() if event.key in ("aten::mm", "aten::addmm"))
    assert products == len(chunks(300, 11, hidden.device))


class _LargestTensor(TorchDispatchMode):
    elements = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        found = [each.numel() for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        self.elements = max(self.elements, *found, 0)
        return result


def test_the_logits_of_a_shard_never_exist_at_once(monkeypatch):
    monkeypatch.setattr(logit_chunks, "CPU_CHUNK_BYTES", 0)  # so that a chunk has as few rows as any
    hidden, weight = leaf(1000, 8), leaf(50, 8)
    with _LargestTensor() as largest:
        log_sum_exp, label_logit = sharded.vocabulary_parallel(hidden, weight, torch.arange(1000) % 100, 50)
        (log_sum_exp - label_logit).sum().backward()
    assert largest.elements == 1000 * 8 > 128 * 50


def test_a_shards_gradients_do_not_underflow_in_float16():
    torch.manual_seed(0)
    hidden, weight, labels = torch.randn(64, 16), torch.randn(40, 16), torch.arange(64) % 80
    found, wanted = [], []
    for gradients, function, dtype in (
        (found, sharded.vocabulary_parallel, torch.float16),
        (wanted, cross_entropy_loss.CONTRACTS["vocabulary_parallel"].reference, torch.float64),
    ):
        leaves = [each.half().to(dtype).requires_grad_() for each in (hidden, weight)]
        log_sum_exp, label_logit = function(*leaves, labels, 40)
        gradients += torch.autograd.grad((log_sum_exp - label_logit).sum() * 2**-18, leaves)
    for mine, theirs in zip(found, wanted, strict=True):
        # Of this size, a float16 has steps of 2**-24.
        torch.testing.assert_close(mine.double(), theirs, rtol=4e-3, atol=2**-24)


@pytest.mark.parametrize("scale, mean", [(65536.0, 0.0), (1024.0, 4.0)], ids=["small gradients", "large sums"])
@pytest.mark.parametrize("tokens", [2048, pytest.param(131072, marks=pytest.mark.thorough)])
def test_a_scaled_loss_of_many_tokens_loses_no_more_in_float16_than_the_reference(tokens, scale, mean):
    """float16 ends at 6e-8 and at 65504. A gradient of the mean over 131072 tokens falls below, one of the sum rises
    above, where half of the tokens have one label; a loss's scale is there for both, if it gets that far.
    """
    torch.manual_seed(0)
    hidden, weight, labels = torch.randn(tokens, 32), torch.randn(256, 32) * 0.02, torch.randint(0, 256, (tokens,))
    labels[::2] = 7
    hidden[::2] += mean

    def gradients(loss, dtype, factor):
        leaves = [tensor.to(dtype).requires_grad_() for tensor in (hidden, weight)]
        found = torch.autograd.grad(loss(*leaves, labels) * factor, leaves)
        return [gradient.double() / factor for gradient in found]

    exact = gradients(cross_entropy_loss.causal, torch.float32, 1.0)
    reference, found = (gradients(f, torch.float16, scale) for f in (cross_entropy_loss.causal, chunked.causal))
    allowed = cross_entropy_loss.GRADIENTS["float16"].norm
    for mine, theirs, true in zip(found, reference, exact, strict=True):
        error, own = (float((gradient - true).norm() / true.norm()) for gradient in (mine, theirs))
        assert error <= min(1.5 * own, allowed)
