"""Token log-probabilities: against the contract with any number of kept logits, in memory, and under torch.compile."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from veomni_conformance import check_kernel
from veomni_ops import head_chunks
from veomni_ops.contract import Size
from veomni_ops.token_logprobs import OUTPUTS
from veomni_ops.token_logprobs import causal as reference
from veomni_triton import cross_entropy_loss
from veomni_triton import token_logprobs as kernels
from veomni_triton.plugin import veomni_kernels
from veomni_triton.token_logprobs import launch, tiles
from veomni_triton.token_logprobs.tiles import ALIGNMENT, FEWEST_WORDS, TILE_BYTES, Tiles

SPECS = [spec for spec in veomni_kernels() if spec.op_name == "token_logprobs"]
LOSS = next(spec for spec in veomni_kernels() if spec.op_name == "cross_entropy_loss")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter runs one element after the other.
SAMPLES = {} if DEVICE == "cuda" else {"largest": Size.SMALL, "every_form": False}
BOTH = ("logprobs", "entropy")


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("options", [{"kept_mib": 0}, {"kept_mib": 512}], ids=["0", "512"])
@pytest.mark.parametrize("dtype", SPECS[0].dtypes)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_conformance(spec, dtype, options):
    check_kernel(spec.configured("the test", options), DEVICE, dtype, **SAMPLES).raise_if_failed()


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("bytes_of_logits", [0, 300 << 20], ids=["chunks", "whole"])
@pytest.mark.parametrize("dtype", LOSS.dtypes)
def test_conformance_of_the_loss(monkeypatch, dtype, bytes_of_logits):
    monkeypatch.setattr(head_chunks, "LOGITS_BYTES", bytes_of_logits)
    monkeypatch.setattr(head_chunks, "_TILE", 8)
    check_kernel(LOSS, DEVICE, dtype, **SAMPLES).raise_if_failed()


@pytest.mark.parametrize("rows", [8, 128])
def test_the_loss_is_the_mean_of_log_probabilities_bit_for_bit(monkeypatch, rows):
    monkeypatch.setattr(head_chunks, "LOGITS_BYTES", 0)
    monkeypatch.setattr(head_chunks, "_TILE", rows)
    states, weight, labels, bias = _problem(30, 500, bias=True, hidden=24)
    labels[3:9] = -100
    loss = cross_entropy_loss.causal(states, weight, labels, bias, num_items_in_batch=1)
    (logprobs,) = kernels.causal_in_fixed_order(kept_mib=0)(states, weight, labels, bias)
    assert torch.equal(loss, -logprobs.sum())


@given(
    tokens=st.integers(1, 9),
    vocabulary=st.integers(1, 70),
    words=st.integers(1, 40),
    columns=st.sampled_from([8, 32]),
    kept_words=st.integers(0, 80),
    bias=st.booleans(),
)
@settings(deadline=None, max_examples=25)
def test_any_tiles(tokens, vocabulary, words, columns, kept_words, bias):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "FEWEST_WORDS", words)
        patch.setattr(tiles, "TILE_BYTES", 0)
        patch.setattr(launch, "COLUMNS", columns)
        inputs = _problem(tokens, vocabulary, bias)
        kernel = kernels.causal(0)
        kernel.keywords["kept_bytes"] = 4 * tokens * kept_words
        _assert_same(kernel, inputs, outputs=OUTPUTS)


@pytest.mark.parametrize("name, same", [("causal_in_fixed_order", True), ("causal", False)])
def test_in_a_fixed_order_no_bits_depend_on_how_many_tokens_there_are(monkeypatch, name, same):
    """More tokens have narrower tiles of words, and other products."""
    monkeypatch.setattr(tiles, "TILE_BYTES", 1 << 14)
    states, weight, labels, bias = _problem(40, 5000, bias=True, hidden=24)
    kernel = getattr(kernels, name)(kept_mib=1)
    among = kernel(states, weight, labels, bias, outputs=OUTPUTS)
    alone = kernel(states[7:8], weight, labels[7:8], bias, outputs=OUTPUTS)
    assert all(torch.equal(many[7:8], one) for many, one in zip(among, alone, strict=True)) == same


def _problem(tokens, vocabulary, bias=False, hidden=12):
    states = torch.randn(tokens, hidden, device=DEVICE, requires_grad=True)
    weight = torch.randn(vocabulary, hidden, device=DEVICE, requires_grad=True)
    labels = torch.randint(vocabulary, (tokens,), device=DEVICE)
    return states, weight, labels, torch.randn(vocabulary, device=DEVICE, requires_grad=True) if bias else None


def _assert_same(kernel, inputs, outputs=BOTH, **options):
    leaves = [each for each in inputs if each is not None and each.requires_grad]
    found, wanted = (call(*inputs, outputs=outputs, **options) for call in (kernel, reference))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    upstream = torch.randn_like(wanted[0]), torch.randn_like(wanted[0])
    gradients = [torch.autograd.grad(results[:2], leaves, upstream) for results in (found, wanted)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


def test_kept_logits_are_the_last_tiles_that_fit():
    hidden = torch.empty(64, 8, dtype=torch.bfloat16)
    words = Tiles.of(hidden, 1 << 30, 0).words
    assert words == TILE_BYTES // (64 * 2)
    vocabulary = 3 * words + 5  # four tiles
    for kept, first in ((0, vocabulary), (5, 3 * words), (words + 4, 3 * words), (words + 5, 2 * words), (1 << 30, 0)):
        cut = Tiles.of(hidden, vocabulary, 128 * kept)
        assert cut.first_kept == first, kept
        assert Tiles.of(hidden, vocabulary, 2 * cut.kept_elements) == cut  # as backward finds them
        assert [each for each in cut if each.start >= first] == list(cut)[
            len(list(cut)) - -(-(vocabulary - first) // words) :
        ]


@pytest.mark.parametrize("tokens", [1, 77, 3000, 12288, 65_539, 10**7])
def test_rows_of_a_tile_begin_where_products_are_fast(tokens):
    words = Tiles.of(torch.empty(tokens, 1, dtype=torch.bfloat16, device="meta"), 10**9, 0).words
    assert words % ALIGNMENT == 0
    assert words == FEWEST_WORDS or 2 * tokens * words <= TILE_BYTES


def test_without_gradients_nothing_is_kept(monkeypatch):
    asked = []
    forward = kernels.token_logprobs_forward
    monkeypatch.setattr(
        kernels, "token_logprobs_forward", lambda *arguments: asked.append(arguments[-1]) or forward(*arguments)
    )
    inputs, kernel = _problem(5, 30), kernels.causal(1)
    with torch.no_grad():
        kernel(*inputs)
    kernel(*(each.detach() for each in inputs[:3]))
    kernel(*inputs)
    assert asked == [0, 0, 1 << 20]


@pytest.mark.thorough
@pytest.mark.parametrize("kept_mib", [0, 1])
def test_compiles_without_a_graph_break(kept_mib):
    compiled = torch.compile(kernels.causal(kept_mib), fullgraph=True, dynamic=True)
    for tokens in (5, 7):
        _assert_same(compiled, _problem(tokens, 40, bias=True), temperature=0.7, softcap=3.0, scale=0.5)


@pytest.mark.gpu
def test_memory_holds_one_tile_and_what_is_kept():
    tokens, hidden, vocabulary = 4096, 256, 65536
    states = torch.randn(tokens, hidden, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocabulary, hidden, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(vocabulary, (tokens,), device=DEVICE)
    gradients = 2 * hidden * (tokens + vocabulary) + 4 * hidden * tokens  # dhidden is summed in float32
    for kept_mib in (0, 256):
        kernel = kernels.causal(kept_mib)
        for _ in range(2):  # cuBLAS allocates its workspaces at the first
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            torch.autograd.grad(kernel(states, weight, labels)[0].sum(), (states, weight))
            used = torch.cuda.max_memory_allocated() - before
        assert used < gradients + TILE_BYTES + (kept_mib << 20) + (8 << 20)
