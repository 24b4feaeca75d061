"""The loss: its composition on plain calls (CPU); the kernel itself on a GPU."""

from __future__ import annotations

import plain_loss
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quack_plugin import spec_of

from veomni_conformance import check_kernel
from veomni_core import KernelSpec
from veomni_ops import cross_entropy_loss as reference
from veomni_quack.cross_entropy_loss import chunks

PLAIN = KernelSpec("plain", "cross_entropy_loss", "causal", "plain_loss:causal", dtypes=("float32", "bfloat16"))
SPEC = spec_of("cross_entropy_loss", "causal")


def problem(tokens, width, vocabulary, dtype=torch.float32, device="cpu", bias=False, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def leaf(*shape, scale=1.0):
        return (scale * torch.randn(*shape, generator=generator)).to(device, dtype).requires_grad_()

    labels = torch.randint(0, vocabulary, (tokens,), generator=generator).to(device)
    labels[::5] = -100
    hidden, weight = leaf(tokens, width), leaf(vocabulary, width, scale=width**-0.5)
    return hidden, weight, labels, leaf(vocabulary) if bias else None


def gradients(loss, arguments):
    return torch.autograd.grad(loss, [t for t in arguments if t is not None and t.requires_grad])


@pytest.mark.parametrize("dtype", PLAIN.dtypes)
def test_the_composition_conforms(dtype, extent):
    check_kernel(PLAIN, "cpu", dtype, **extent).raise_if_failed()


@settings(max_examples=25)
@given(
    tokens=st.integers(0, 40),
    width=st.integers(1, 20),
    vocabulary=st.integers(1, 30),
    rows=st.integers(1, 12),
    bias=st.booleans(),
    bounds=st.sampled_from([{}, {"softcap": 3.0}, {"scale": 0.5}, {"softcap": 3.0, "scale": 2.0}]),
    seed=st.integers(0, 1000),
)
def test_any_size_in_any_number_of_chunks(tokens, width, vocabulary, rows, bias, bounds, seed):
    arguments = problem(tokens, width, vocabulary, bias=bias, seed=seed)
    wanted = reference.causal(*arguments, **bounds)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "chunk_tokens", lambda tokens, vocabulary: rows)
        found = plain_loss.causal(*arguments, **bounds)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(gradients(found, arguments), gradients(wanted, arguments), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_only_what_is_wanted_is_computed():
    hidden, weight, labels, bias = problem(9, 8, 17, bias=True)
    wanted = [True, False]

    def found(*wants):
        with torch.no_grad():
            return chunks.loss_and_gradients(hidden, weight, labels, bias, -100, None, None, *wants, plain_loss.CALLS)

    full = found(True, True)
    for wants in [(a, b) for a in wanted for b in wanted]:
        some = found(*wants)
        assert torch.equal(some[0], full[0])
        for one, whole, want in zip(some[1:], full[1:], (wants[0], *3 * [wants[1]]), strict=True):
            assert torch.equal(one, whole) if want else one.numel() == 0


def test_a_frozen_head_leaves_no_chunk_behind():
    hidden, weight, labels, _ = problem(9, 8, 17)
    with torch.no_grad():
        *_, last = chunks.loss_and_gradients(
            hidden, weight, labels, None, -100, None, None, True, False, plain_loss.CALLS
        )
    assert last.untyped_storage().nbytes() == 0


@pytest.mark.parametrize("vocabulary,tokens", [(151936, 2048), (128256, 2560), (32000, 8192), (10**9, 256), (50, 8192)])
def test_a_chunk_is_whole_tiles_within_the_budget(vocabulary, tokens):
    assert chunks.chunk_tokens(8192, vocabulary) == tokens
    assert chunks.chunk_tokens(100, vocabulary) == 100


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", SPEC.dtypes)
def test_conformance(dtype):
    check_kernel(SPEC, "cuda", dtype).raise_if_failed()


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 61])
def test_several_chunks_are_as_one(width, monkeypatch):
    arguments = problem(1000, width, 1003, torch.bfloat16, "cuda", bias=True)
    kernel = SPEC.load()

    def run():
        loss = kernel(*arguments)
        return loss.detach(), *gradients(loss, arguments)

    whole = run()
    monkeypatch.setattr(chunks, "chunk_tokens", lambda tokens, vocabulary: 128)
    for part, one in zip(run(), whole, strict=True):
        assert (part.double() - one.double()).norm() <= 4e-3 * one.double().norm()


@pytest.mark.gpu
def test_evaluation_takes_no_gradients():
    arguments = problem(4096, 512, 32000, torch.bfloat16, "cuda")
    kernel = SPEC.load()
    with torch.no_grad():
        kernel(*arguments)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        quiet = kernel(*arguments)
    logits = 2 * 4096 * 32000
    assert torch.cuda.max_memory_allocated() - before <= logits + 2**20
    torch.testing.assert_close(quiet, kernel(*arguments).detach(), rtol=1e-5, atol=0)


@pytest.mark.gpu
def test_compiles_without_a_graph_break():
    torch._dynamo.reset()
    kernel, arguments = SPEC.load(), problem(300, 64, 1000, torch.bfloat16, "cuda")
    wanted = kernel(*arguments)
    found = torch.compile(kernel, fullgraph=True)(*arguments)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)
    for mine, theirs in zip(gradients(found, arguments), gradients(wanted, arguments), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.gpu
def test_a_step_reads_nothing_on_the_host():
    kernel, arguments = SPEC.load(), problem(300, 64, 1000, torch.bfloat16, "cuda")
    gradients(kernel(*arguments), arguments)
    torch.cuda.set_sync_debug_mode("error")
    try:
        gradients(kernel(*arguments), arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_the_memory_of_a_large_vocabulary():
    tokens, width, vocabulary = 8192, 2048, 151936
    kernel, arguments = SPEC.load(), problem(tokens, width, vocabulary, torch.bfloat16, "cuda")
    gradients(kernel(*arguments), arguments)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = gradients(kernel(*arguments), arguments)
    torch.cuda.synchronize()
    # Beyond the gradients: the weight's in float32, and one chunk of logits (QuACK's own chunks are twice as long).
    held = sum(tensor.nbytes for tensor in found)
    assert torch.cuda.max_memory_allocated() - before - held <= 1.8 * 2**30
