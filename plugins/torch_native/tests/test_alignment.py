"""What a GPU's kernels of 16-byte loads are handed, wherever training left it: on the CPU, with stand-ins that look."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional as F

from veomni_core.ops.attention import AttentionModule
from veomni_core.ops.catalog import BUILTIN_OPS
from veomni_core.ops.contract import Size, contract_for
from veomni_core.testing.frozen_inputs import check_frozen_inputs
from veomni_core.testing.memory_layouts import check_memory_layouts
from veomni_core.testing.mixed_dtypes import check_mixed_dtypes
from veomni_core.testing.subject import Subject
from veomni_torch import attention, grouped_products
from veomni_torch.plugin import veomni_kernels

OPS = {op.name: op for op in BUILTIN_OPS}
SPECS = [spec for spec in veomni_kernels() if spec.op_name in ("attention", "moe_experts")]
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
    added = [each for each in (mask, options.get("position_bias")) if each is not None]
    assert all(each.dtype in (torch.bool, query.dtype) for each in added)  # the fused kernels misread them
    fused = torch.backends.cuda.mem_efficient_sdp_enabled()
    if fused and any(each.requires_grad for each in added) > any(each.requires_grad for each in (query, key, value)):
        raise RuntimeError("LSE is not correctly aligned (strideH)")
    for each in added:
        assert not each.is_floating_point() or each.data_ptr() % 16 == 0
    output, _ = _SDPA(module, query, key, value, mask, **options)
    return _Looks.apply(output), None


def looking_grouped_mm(left, right, offs):
    """With the checks of ``torch._grouped_mm`` before a GPU's kernel is launched."""
    for matrix in (left, right):
        rows, columns = matrix.stride()[-2:]
        assert matrix.data_ptr() % 16 == 0, "expected data_ptr to be aligned to 16 bytes"
        assert (rows == 1 and columns >= matrix.shape[-2]) or (columns == 1 and rows >= matrix.shape[-1]), "overlapping"
        assert all(s * matrix.element_size() % 16 == 0 for s in matrix.stride() if s != 1), matrix.stride()
    starts = [0, *offs.tolist()]
    groups = [slice(a, b) for a, b in itertools.pairwise(starts)]
    if right.dim() == 2:
        return _padded(torch.stack([left[:, group] @ right[group] for group in groups]))
    rest = left.new_full((len(left) - starts[-1], right.shape[2]), torch.nan)  # nobody's rows, which nobody wrote
    return _padded(torch.cat([*(left[group] @ right[number] for number, group in enumerate(groups)), rest]))


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


@pytest.mark.parametrize("question", [check_memory_layouts, check_frozen_inputs, check_mixed_dtypes])
@pytest.mark.parametrize("spec, dtype", CASES)
def test_what_training_gives_is_where_kernels_can_read_it(spec, dtype, question):
    contract = contract_for(OPS[spec.op_name], spec.variant)
    subject = Subject(spec, spec.load(), contract, torch.device("cpu"), getattr(torch, dtype))
    for position in filter(subject.is_asked_more, subject.positions(Size.SMALL)):
        if not subject.undeclared(position):
            assert not list(question(subject, position)), subject.sample(position).name


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec.op_name == "moe_experts"], ids=str)
def test_experts_of_odd_widths(spec):
    kernel, torch_dtype = spec.load(), torch.bfloat16
    reference = contract_for(OPS["moe_experts"], spec.variant).reference
    shapes = ((9, 2), (3, 2 * 11, 13), (3, 13, 11))
    weights, gate_up, down = (torch.rand(*shape, dtype=torch_dtype).requires_grad_() for shape in shapes)
    hidden, index = torch.randn(9, 13, dtype=torch_dtype).requires_grad_(), torch.arange(18).view(9, 2) % 4
    leaves = (hidden, weights, gate_up, down)
    found, wanted = (call(hidden, index, weights, gate_up, down) for call in (kernel, reference))
    pairs = (torch.autograd.grad(result.float().sum(), leaves) for result in (found, wanted))
    for mine, theirs in [(found, wanted), *zip(*pairs, strict=True)]:
        assert (mine.double() - theirs.double()).norm() <= 3e-2 * theirs.double().norm()


def test_heads_that_lie_well_are_not_copied(monkeypatch):
    seen = []

    def record(module, *inputs, **options):
        seen.extend(inputs)
        return _SDPA(module, *inputs, **options)

    monkeypatch.setattr(attention, "sdpa_attention_forward", record)
    inputs = (*torch.randn(1, 9, 3, 2, 16).transpose(1, 3).unbind(2), torch.zeros(1, 1, 9, 9))
    attention.sdpa(AttentionModule(1), *inputs)
    assert all(mine is theirs for mine, theirs in zip(seen, inputs, strict=True))


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
