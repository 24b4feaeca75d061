"""What a GPU's kernels of 16-byte loads are handed, wherever training left it: on the CPU, with stand-ins that look."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional as F

from veomni_conformance.frozen_inputs import check_frozen_inputs
from veomni_conformance.memory_layouts import check_memory_layouts
from veomni_conformance.mixed_dtypes import check_autocast, check_mixed_dtypes
from veomni_conformance.subject import Subject
from veomni_ops.attention import AttentionModule
from veomni_ops.catalog import OPS
from veomni_ops.contract import Size, contract_for
from veomni_torch import attention, grouped_products
from veomni_torch.plugin import veomni_kernels

OPS = {op.name: op for op in OPS}
SPECS = [
    spec
    for spec in veomni_kernels()
    if spec.op_name in ("attention", "moe_experts") and spec.hardware.device_type != "cpu"  # of accelerators
]
CASES = [pytest.param(spec, dtype, id=f"{spec}-{dtype}") for spec in SPECS for dtype in spec.dtypes]


def check_heads(*heads):
    """As torch's flash, memory-efficient and cuDNN attention, which pad heads of odd widths first."""
    for each in heads:
        size = each.element_size()
        if each.shape[-1] * size % 16 == 0:
            assert each.data_ptr() % 16 == 0, "misaligned address"
            assert each.stride(-1) == 1 and all(stride * size % 16 == 0 for stride in each.stride()[:-1]), each.stride()


class _Looks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, output):
        return output.view_as(output)

    @staticmethod
    def backward(ctx, upstream):
        check_heads(upstream)
        return upstream


def looking_sdpa(module, query, key, value, mask, **options):
    check_heads(query, key, value)
    assert all(
        stride or size == 1 for each in (key, value) for size, stride in zip(each.shape, each.stride(), strict=True)
    )
    assert "position_bias" not in options  # it is part of the mask
    if mask is not None:
        assert mask.dtype in (torch.bool, query.dtype)  # the fused kernels misread another
        assert mask.dtype == torch.bool or mask.data_ptr() % 16 == 0
        if mask.requires_grad:
            # In 16 bits its gradient is that of a rounded output, and a saved slice of padded rows is misaligned.
            assert mask.dtype == torch.float32
            fused = torch.backends.cuda.mem_efficient_sdp_enabled()
            if fused and not any(each.requires_grad for each in (query, key, value)):
                raise RuntimeError("LSE is not correctly aligned (strideH)")
    output, _ = _SDPA(module, query, key, value, mask, **options)
    return _Looks.apply(output), None


def looking_grouped_mm(left, right, offs):
    """With the checks of ``torch._grouped_mm`` before a GPU's kernel is launched, and its assertions on the device."""
    for matrix in (left, right):
        rows, columns = matrix.stride()[-2:]
        assert matrix.data_ptr() % 16 == 0, "expected data_ptr to be aligned to 16 bytes"
        assert (rows == 1 and columns >= matrix.shape[-2]) or (columns == 1 and rows >= matrix.shape[-1]), "overlapping"
        assert all(s * matrix.element_size() % 16 == 0 for s in matrix.stride() if s != 1), matrix.stride()
    starts = [0, *offs.tolist()]
    unit = 16 // left.element_size()
    # The dimension that groups cut is the left operand's rows, or, where both are matrices, its columns and the right
    # operand's rows. Where that dimension is contiguous, each group must begin at a multiple of 16 bytes.
    if _is_column_major(left) == (right.dim() == 3) or (right.dim() == 2 and _is_column_major(right)):
        assert all((b - a) % unit == 0 for a, b in itertools.pairwise(starts)), "device-side assert triggered"
    groups = [slice(a, b) for a, b in itertools.pairwise(starts)]
    if right.dim() == 2:
        return _padded(torch.stack([_product(left[:, group], right[group]) for group in groups]))
    rest = left.new_full((len(left) - starts[-1], right.shape[2]), torch.nan)  # nobody's rows, which nobody wrote
    return _padded(torch.cat([*(_product(left[group], right[number]) for number, group in enumerate(groups)), rest]))


def _product(left, right):
    # On the CPU, products of bf16 rows of 5 or 7 elements read on beside them (oneDNN in PyTorch 2.13). Padding may be
    # NaN there, and so is zero times that.
    return left.contiguous() @ right.contiguous()


def _is_column_major(matrix):
    """As ``torch._grouped_mm`` tells; a matrix that is both counts as this."""
    rows, columns = matrix.stride()[-2:]
    return rows == 1 and columns >= max(1, matrix.shape[-2])


def _padded(product):
    unit = 16 // product.element_size()
    return F.pad(product, (0, -product.shape[-1] % unit))[..., : product.shape[-1]]


_SDPA = attention.sdpa_attention_forward


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(attention, "_MOVES_16_BYTES", ("cpu",))
    monkeypatch.setattr(attention, "sdpa_attention_forward", looking_sdpa)
    monkeypatch.setattr(grouped_products, "_has_grouped_mm", lambda rows: rows.shape[0] > 0)
    monkeypatch.setattr(F, "grouped_mm", looking_grouped_mm, raising=False)


@pytest.mark.thorough(one_per=["spec"])
@pytest.mark.parametrize("question", [check_memory_layouts, check_frozen_inputs, check_mixed_dtypes, check_autocast])
@pytest.mark.parametrize("spec, dtype", CASES)
def test_what_training_gives_is_where_kernels_can_read_it(spec, dtype, question):
    contract = contract_for(OPS[spec.op_name], spec.variant)
    subject = Subject(spec, spec.load(), contract, torch.device("cpu"), getattr(torch, dtype))
    for position in filter(subject.is_asked_more, subject.positions(Size.SMALL)):
        if not subject.refused(position):
            assert not list(question(subject, position)), subject.sample(position).name


@pytest.mark.parametrize("rank", [1, 4, 5, 8])
@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec.op_name == "moe_experts"], ids=str)
def test_adapters_of_any_rank_in_groups_of_any_size(spec, rank):
    torch.manual_seed(0)  # a gate at its clamp has a gradient or none by rounding alone
    parts = [torch.randn(3, *shape, dtype=torch.bfloat16) for shape in ((2 * 16, 24), (24, 16))]
    adapters = [
        (
            torch.randn(3, rank, each.shape[2], dtype=torch.bfloat16).requires_grad_(),
            torch.randn(3, each.shape[1], rank, dtype=torch.bfloat16).requires_grad_(),
            0.5,
        )
        for each in parts
    ]
    hidden, index = torch.randn(9, 24, dtype=torch.bfloat16).requires_grad_(), torch.arange(18).view(9, 2) % 4
    leaves = (hidden, *(each for a, b, _ in adapters for each in (a, b)))
    options = {"gate_up_lora": adapters[0], "down_lora": adapters[1]}
    calls = (spec.load(), contract_for(OPS["moe_experts"], spec.variant).reference)
    found, wanted = (call(hidden, index, torch.full((9, 2), 0.5).bfloat16(), *parts, **options) for call in calls)
    _assert_near(found, wanted, leaves)


def _assert_near(found, wanted, leaves):
    pairs = (torch.autograd.grad(result.float().sum(), leaves) for result in (found, wanted))
    for mine, theirs in [(found, wanted), *zip(*pairs, strict=True)]:
        assert (mine.double() - theirs.double()).norm() <= 3e-2 * theirs.double().norm()


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec.op_name == "moe_experts"], ids=str)
def test_experts_of_odd_widths(spec):
    torch.manual_seed(0)
    kernel, torch_dtype = spec.load(), torch.bfloat16
    reference = contract_for(OPS["moe_experts"], spec.variant).reference
    shapes = ((9, 2), (3, 2 * 11, 13), (3, 13, 11))
    weights, gate_up, down = (torch.rand(*shape, dtype=torch_dtype).requires_grad_() for shape in shapes)
    hidden, index = torch.randn(9, 13, dtype=torch_dtype).requires_grad_(), torch.arange(18).view(9, 2) % 4
    leaves = (hidden, weights, gate_up, down)
    found, wanted = (call(hidden, index, weights, gate_up, down) for call in (kernel, reference))
    _assert_near(found, wanted, leaves)


def test_heads_that_lie_well_are_not_copied(monkeypatch):
    seen = []

    def record(module, *inputs, **options):
        seen.extend(inputs)
        return _SDPA(module, *inputs, **options)

    monkeypatch.setattr(attention, "sdpa_attention_forward", record)
    inputs = (*torch.randn(1, 9, 3, 2, 16).transpose(1, 3).unbind(2), torch.zeros(1, 1, 9, 9))
    attention.sdpa(AttentionModule(1), *inputs)
    assert all(mine is theirs for mine, theirs in zip(seen, inputs, strict=True))


@pytest.mark.parametrize("autocast", [False, True])
def test_a_row_in_which_everything_is_masked_stays_finite(autocast):
    """By the lowest float32, which is infinite in bfloat16: as eager code, such a row attends to all keys alike."""
    dtype = torch.float32 if autocast else torch.bfloat16
    query, key, value = (torch.randn(1, 2, 5, 16, dtype=dtype) for _ in range(3))
    mask = torch.zeros(1, 1, 5, 5).index_fill(2, torch.tensor([3]), torch.finfo(torch.float32).min)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found, _ = attention.sdpa(AttentionModule(1), query, key, value, mask)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found[0, 3].float(), value[0].float().mean(1), rtol=2e-2, atol=2e-2)


def test_a_mask_of_more_pairs_than_the_kernels_count_is_refused(monkeypatch):
    monkeypatch.setattr(attention, "_MOST_PAIRS", 24)
    heads = [torch.randn(1, 2, 5, 16) for _ in range(3)]
    assert attention.sdpa(AttentionModule(1), *heads, None)[0].isfinite().all()
    with pytest.raises(ValueError, match="this call has 5 queries and 5 keys; choose flash_attention_2"):
        attention.sdpa(AttentionModule(1), *heads, torch.zeros(1, 1, 5, 5))


@pytest.mark.parametrize("offset", [0, 1])
def test_attention_compiles_without_a_graph_break(monkeypatch, offset):
    monkeypatch.setattr(attention, "sdpa_attention_forward", _SDPA)
    torch._dynamo.reset()

    def call(*heads):
        return attention.sdpa(AttentionModule(1), *heads, None)[0]

    inputs = [torch.randn(offset + 288)[offset:].view(1, 2, 9, 16).requires_grad_() for _ in range(3)]
    results = [each(*inputs) for each in (torch.compile(call, fullgraph=True, backend="aot_eager"), call)]
    torch.testing.assert_close(*results)
    torch.testing.assert_close(*(torch.autograd.grad(each.sum(), inputs) for each in results))
