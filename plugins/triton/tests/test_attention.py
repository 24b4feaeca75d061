"""attention against its contract, and what would change the bits of a row. Without a GPU: in Triton's interpreter."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from veomni_conformance import check_kernel
from veomni_conformance.batch_invariance import check_batch_invariance
from veomni_conformance.subject import Subject
from veomni_conformance.time_spent import TimeSpent
from veomni_core.errors import ConfigError
from veomni_ops.attention import CONTRACTS, AttentionModule, standard
from veomni_ops.contract import Size
from veomni_triton.attention import attention, operators
from veomni_triton.plugin import veomni_kernels

SPEC = next(spec for spec in veomni_kernels() if (spec.op_name, spec.name) == ("attention", "triton"))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter runs one element after the other.
SAMPLES = {} if DEVICE == "cuda" else {"largest": Size.SMALL, "every_form": False}


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", SPEC.dtypes)
def test_conformance(dtype):
    check_kernel(SPEC, DEVICE, dtype, **SAMPLES).raise_if_failed()


def heads(batch, queries, keys=None, q_heads=4, k_heads=2, dtype=torch.float32):
    """Queries, keys and values of 16 columns."""
    shapes = ((q_heads, queries), (k_heads, keys or queries), (k_heads, keys or queries))
    return [torch.randn(batch, *shape, 16, device=DEVICE, dtype=dtype, requires_grad=True) for shape in shapes]


def causal_mask(length, padding, dtype=None):
    """A mask with padding before; of ``dtype``, one that is added."""
    seen = torch.ones(length, length, dtype=torch.bool, device=DEVICE).tril()
    seen[:, :padding] = False
    if dtype is None:
        return seen[None, None]
    return torch.zeros(1, 1, length, length, dtype=dtype, device=DEVICE).masked_fill(~seen, torch.finfo(dtype).min)


@pytest.mark.parametrize("mask", [None, torch.float32], ids=["boolean", "added"])
def test_padding_before_more_than_a_block_of_keys_changes_no_bits(mask):
    """An added mask has the lowest numbers alone for the padding's queries, whose tile another launch computes."""
    alone = heads(1, 75)
    padded = [torch.cat([torch.randn_like(each[:, :, :37]), each], dim=2) for each in alone]
    wanted, _ = attention(AttentionModule(2), *alone, None)
    found, _ = attention(AttentionModule(2), *padded, causal_mask(112, 37, mask))
    assert torch.equal(found[:, 37:], wanted)


def test_numbers_before_a_row_that_reads_a_mask_change_no_bits():
    call, mask = heads(1, 40), causal_mask(40, 0, torch.float32)
    wanted, _ = attention(AttentionModule(2), *call, mask)
    mask[..., 20, 3] = 1.5
    found, _ = attention(AttentionModule(2), *call, mask)
    changed = (found != wanted).flatten(2).any(2)[0]
    assert changed.nonzero().flatten().tolist() == [20]


def test_sinks_of_any_stride_are_read():
    call, sinks = heads(1, 20), torch.randn(8, device=DEVICE, requires_grad=True)
    found, _ = attention(AttentionModule(2), *call, None, s_aux=sinks[::2])
    wanted, _ = attention(AttentionModule(2), *call, None, s_aux=sinks[::2].detach().clone())
    assert torch.equal(found, wanted)
    found.sum().backward()
    assert (sinks.grad != 0).tolist() == [True, False] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_row_whose_added_mask_hides_all_keys_is_the_reference_s(dtype):
    """In float16 the lowest number leaves differences of scores; in others every key has the same weight."""
    call = heads(2, 35, dtype=dtype)
    mask = torch.cat([causal_mask(35, padding, dtype) for padding in (0, 33)])
    exact = [each.detach().double().requires_grad_() for each in call]
    wide = mask.double()
    if dtype == torch.float32:
        wide = wide * 1e30  # float64 has room for the scores beside float32's lowest number
    found, wanted = attention(AttentionModule(2), *call, mask)[0], standard(AttentionModule(2), *exact, wide)[0]
    upstream = torch.randn_like(found)
    pairs = zip(
        (found, *torch.autograd.grad(found, call, upstream)),
        (wanted, *torch.autograd.grad(wanted, exact, upstream.double())),
        strict=True,
    )
    for mine, theirs in pairs:
        assert (mine.double() - theirs).norm() <= (1e-5 if dtype == torch.float32 else 5e-3) * theirs.norm()


def numbers(*rows):
    """Rows of an added mask ``[1, 1, S, 70]``, each of pieces ``(keys, number)``."""
    made = [torch.cat([torch.full((length,), float(number)) for length, number in row]) for row in rows]
    return torch.stack(made)[None, None].to(DEVICE)


LOWEST = torch.finfo(torch.float32).min
VERY_LOW = numbers(
    [(70, -1e9)],
    [(30, -1e9), (40, LOWEST)],
    [(10, LOWEST), (30, -1e9), (30, -1e9 - 64)],
    [(30, float("-inf")), (20, -1e30), (20, -2e30)],
    [(69, LOWEST), (1, LOWEST / 1.5)],
    [(35, -2e4), (35, -2e4 + 1)],
    [(35, -999), (35, -1001)],
    [(35, 1e2), (35, -1e9)],
    [(5, -1e9), (65, 0)],
    [(20, 0.5), (30, 0), (20, -0.5)],
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_rows_of_very_low_numbers_are_eager_attention_s_in_float32(dtype, softcap):
    """Beside -1e9, float32 has no room for scores, which so are alike; the sum's logarithm would be lost as well."""
    torch.manual_seed(0)
    call = [each.detach().to(dtype).requires_grad_() for each in heads(2, 10, 70)]
    wide = [each.detach().float().requires_grad_() for each in call]
    found, wanted = (
        kernel(AttentionModule(2), *inputs, VERY_LOW, scaling=0.5, softcap=softcap)[0]
        for kernel, inputs in ((attention, call), (standard, wide))
    )
    upstream = torch.randn_like(wanted).to(dtype)
    got = (found, *torch.autograd.grad(found, call, upstream))
    expected = (wanted, *torch.autograd.grad(wanted, wide, upstream.float()))
    for mine, theirs in zip(got, expected, strict=True):
        by_row = (mine.float() - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp_min(1e-3)
        # float32's numbers are 0.002 apart beside -2e4, and either neighbour may be a score's.
        assert by_row.max() <= (3e-3 if dtype == torch.float32 else 5e-2)


@pytest.mark.parametrize("bounds", [None, (0, 5, 77, 90)], ids=["causal", "packed"])
def test_queries_that_see_a_tile_of_keys_are_all_counted(monkeypatch, bounds):
    monkeypatch.setattr(operators, "SMALL", dataclasses.replace(operators.SMALL, queries=16, keys=16))
    monkeypatch.setattr(operators, "_ROWS", 32)
    call, packed = heads(1, 90), {}
    if bounds is not None:
        ends = torch.tensor(bounds, dtype=torch.int32, device=DEVICE)
        packed = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    found, wanted = (
        torch.autograd.grad(kernel(AttentionModule(2), *call, None, **packed)[0].square().sum(), call)
        for kernel in (attention, standard)
    )
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def subject(kernel=attention):
    spec = dataclasses.replace(SPEC, factory=kernel)
    return Subject(spec, kernel, CONTRACTS["standard"], torch.device(DEVICE), torch.float32, TimeSpent())


def other_bits(asked, *names):
    """What samples say whose batch, layout or cache changes the bits of a query; of all samples, without names."""
    positions = (each for each in asked.positions(Size.SMALL) if not asked.refused(each))
    chosen = [each for each in positions if not names or asked.sample(each).name in names]
    assert len(chosen) >= len(names)
    return [sentence for position in chosen for sentence in check_batch_invariance(asked, position)]


def test_layouts_give_the_same_bits():
    assert (
        other_bits(subject(), "sliding window", "packed, the last queries", "softcap and sinks", "groups of three")
        == []
    )


@pytest.mark.thorough
def test_layouts_of_every_sample_give_the_same_bits(monkeypatch):
    monkeypatch.setattr(operators, "SMALL", dataclasses.replace(operators.SMALL, queries=16, keys=16))  # some of each
    assert other_bits(subject()) == []


def blocks_from_the_first_key_of_all(module, query, key, value, mask, **options):
    """Where padding is seen too, at a weight of zero: the blocks of a padded row begin elsewhere."""
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, -1e4)
    return attention(module, query, key, value, mask, **options)


def blocks_by_the_batch(module, query, *call, **options):
    with pytest.MonkeyPatch.context() as patch:
        if query.shape[2] == 1:
            patch.setattr(operators, "SMALL", dataclasses.replace(operators.SMALL, keys=16))
        return attention(module, query, *call, **options)


@pytest.mark.skipif(DEVICE != "cpu", reason="tiles of float32, of which the interpreter adds up each exactly")
@pytest.mark.parametrize(
    "broken, words",
    [(blocks_from_the_first_key_of_all, "where it is padded on the left"), (blocks_by_the_batch, "is decoded")],
)
def test_other_blocks_of_keys_are_caught(monkeypatch, broken, words):
    if broken is blocks_from_the_first_key_of_all:
        monkeypatch.setattr(operators, "SMALL", dataclasses.replace(operators.SMALL, keys=16))
    assert words in other_bits(subject(broken), "causal, grouped heads")[0]


def test_what_is_not_computed_is_refused():
    call = heads(1, 9)
    wide = [torch.randn(1, 2, 9, 264, device=DEVICE) for _ in range(3)]
    for arguments, options, message in (
        ((*call, torch.ones(1, 9, dtype=torch.bool)), {}, "a mask of other than 4 dimensions; choose eager or sdpa"),
        ((*call, None), {"dropout": 0.1}, "triton does not compute dropout"),
        *(
            ((*call, torch.zeros(1, 1, 9, 9, dtype=each)), {}, "integers or float64")
            for each in (torch.float64, torch.int32)
        ),
        ((*call, torch.zeros(1, 1, 9, 9, requires_grad=True)), {}, "the gradient of a mask"),
        ((*wide, None), {}, "heads above 256"),
    ):
        with pytest.raises(ConfigError, match=message):
            attention(AttentionModule(2), *arguments, **options)
