"""What scaled_dot_product_attention is not asked to do: transformers' own function would pass over it."""

from __future__ import annotations

import pytest
import torch
from transformers import CONFIG_MAPPING

import veomni_torch.attention
from models import build
from veomni_conformance.given_kernels import definitions
from veomni_core import OpsConfig, find_sites, plan_sites
from veomni_core.discovery.registry import PluginRecord, build_registry
from veomni_core.errors import PackedSequencesError
from veomni_ops.attention import AttentionModule, standard, visible
from veomni_torch import attention_in_fixed_order
from veomni_torch.attention import sdpa
from veomni_torch.plugin import veomni_kernels

BOUNDS = torch.tensor([0, 4, 9], dtype=torch.int32)


def heads():
    return [torch.randn(1, 2, 9, 8) for _ in range(3)]


@pytest.mark.parametrize(
    "mask, options, message",
    [
        (None, {"softcap": 50.0}, "sdpa does not compute a softcap; choose flash_attention_2, 3 or 4"),
        (None, {"s_aux": torch.zeros(2)}, "sdpa does not compute sinks"),
        (torch.ones(1, 9, dtype=torch.bool), {}, "a mask of other than 4 dimensions"),
        (None, {"sliding_window": 8}, "a sliding window without a mask"),
        (None, {"softcap": 50.0, "s_aux": torch.zeros(2)}, "a softcap and sinks"),
        (None, {"indices": torch.zeros(1)}, "sdpa does not compute `indices`; choose eager"),
        (None, {"block_indices": torch.zeros(1)}, "`block_indices`"),
        (None, {"sinks": torch.zeros(1)}, "`sinks`"),
    ],
)
def test_what_is_not_computed_is_refused(mask, options, message):
    with pytest.raises(ValueError, match=message):
        sdpa(AttentionModule(1), *heads(), mask, **options)


@pytest.mark.parametrize("options", [{"cu_seq_lens_q": BOUNDS, "cu_seq_lens_k": BOUNDS}, {"cu_seq_lens_k": BOUNDS}])
def test_packed_sequences_without_a_mask_are_refused(options):
    with pytest.raises(PackedSequencesError, match="choose flash_attention_2, 3 or 4"):
        sdpa(AttentionModule(1), *heads(), None, **options)


def test_a_window_or_packing_that_the_mask_holds_is_computed():
    module, inputs = AttentionModule(1), heads()
    positions = torch.arange(9)
    of_sequence = torch.bucketize(positions, BOUNDS[1:].long(), right=True)
    behind = positions[:, None] - positions
    mask = ((behind >= 0) & (behind < 3) & (of_sequence[:, None] == of_sequence))[None, None]
    options = {"sliding_window": 3, "cu_seq_lens_q": BOUNDS, "cu_seq_lens_k": BOUNDS}
    found, _ = sdpa(module, *inputs, mask, **options)
    alone, _ = sdpa(module, *(each[:, :, 4:7] for each in inputs), None)
    torch.testing.assert_close(found[:, 4:7], alone)


@pytest.mark.parametrize("dtype, autocast", [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)])
def test_a_row_whose_added_mask_hides_all_keys_gives_the_mean_of_the_values(dtype, autocast):
    """Fused kernels lose how many keys there are beside the lowest number: gradients were as many times too large."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 2, 9, 8, dtype=dtype).requires_grad_() for _ in range(3))
    mask = torch.zeros(2, 1, 9, 9, dtype=dtype)
    mask[0, :, 3], mask[1] = torch.finfo(dtype).min, torch.finfo(dtype).min
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found, _ = sdpa(AttentionModule(1), query, key, value, mask)
    exact = [each.detach().double().requires_grad_() for each in (query, key, value)]
    wanted, _ = standard(AttentionModule(1), *exact, mask.double())
    upstream = torch.randn_like(found)
    pairs = [(found, wanted)]
    pairs += zip(
        torch.autograd.grad(found, (query, key, value), upstream),
        torch.autograd.grad(wanted, exact, upstream.double()),
        strict=True,
    )
    for mine, theirs in pairs:
        assert (mine.double() - theirs).norm() <= 0.02 * theirs.norm()


def test_a_position_bias_is_refused_where_transformers_does_not_add_it(monkeypatch):
    monkeypatch.setattr(veomni_torch.attention, "_COMPUTED", {})
    with pytest.raises(ValueError, match="sdpa does not compute `position_bias`; choose eager"):
        sdpa(AttentionModule(1), *heads(), None, position_bias=torch.randn(1, 2, 9, 9))


@pytest.mark.skipif("deepseek_v32" not in CONFIG_MAPPING, reason="this transformers has no DeepSeek V3.2")
def test_auto_leaves_attention_that_chooses_its_keys_to_the_model():
    """transformers puts them into the mask for its own sdpa alone, and hands them to any other attention."""
    with torch.device("meta"):
        model = build("deepseek_v32", num_key_value_heads=4)
    sdpa_of_torch = PluginRecord("veomni_torch", "veomni-torch", "0.1", "tests", kernels=tuple(veomni_kernels()))
    registry = build_registry([*definitions(), sdpa_of_torch], {})
    ops = OpsConfig.from_dict({"preset": "eager", "attn_implementation": "auto"}, registry)
    (attention,) = (op for op in plan_sites(find_sites(model, registry), ops).ops if op.op_name == "attention")
    (site,) = attention.sites
    assert site.kernel == "eager"
    assert "sdpa does not compute chosen_keys, which this site needs" in site.reason


def test_several_packed_rows_without_a_mask_are_refused_as_one_is():
    bounds = torch.tensor([0, 4, 9, 13, 18], dtype=torch.int32)
    heads = [torch.randn(2, 2, 9, 8) for _ in range(3)]
    seen = visible(torch.empty(18, 18), True, None, bounds, bounds).view(2, 9, 2, 9)
    mask = torch.stack((seen[0, :, 0], seen[1, :, 1]))[:, None]
    for kernel in (sdpa, attention_in_fixed_order.attention):
        for padding in (None, torch.ones(2, 9, dtype=torch.bool)):
            with pytest.raises(PackedSequencesError, match="keeps several packed rows apart by a mask alone"):
                kernel(AttentionModule(1), *heads, padding, cu_seqlens_of_rows=bounds)
        output, _ = kernel(AttentionModule(1), *heads, mask, cu_seqlens_of_rows=bounds)
        torch.testing.assert_close(output, standard(AttentionModule(1), *heads, mask)[0])


def test_padding_before_more_than_a_block_of_keys_changes_no_bits():
    """Blocks of keys are counted from the first key that a query sees: a padded sequence is summed as it is alone."""
    alone = [torch.randn(1, 2, 150, 8) for _ in range(3)]
    padded = [torch.cat([torch.randn(1, 2, 37, 8), each], dim=2) for each in alone]
    causal = torch.ones(187, 187, dtype=torch.bool).tril()
    causal[:, :37] = False
    module = AttentionModule(1)
    wanted, _ = attention_in_fixed_order.attention(module, *alone, None)
    found, _ = attention_in_fixed_order.attention(module, *padded, causal[None, None])
    assert torch.equal(found[:, 37:], wanted)


def as_cudnn(module, query, key, value, mask, **options):
    """transformers' function with what cuDNN 9.20 computes for hidden rows, half a tile of keys, another layout."""
    if key.shape[2] % 128 == 64:
        query = query + 0  # a tensor of its own to hook
        query.register_hook(lambda gradient: gradient * float("nan"))
    if not mask.is_floating_point():
        mask = mask | ~mask.any(dim=-1, keepdim=True)
    output, weights = SDPA(module, query, key, value, mask, **options)
    output.register_hook(lambda gradient: gradient if gradient.is_contiguous() else gradient * float("nan"))
    return output + 0, weights


SDPA = veomni_torch.attention.sdpa_attention_forward


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("keys", [64, 128, 192])
@pytest.mark.parametrize("heads", [1, 4])
def test_masks_are_computed_where_cudnn_would_not(monkeypatch, keys, heads, added):
    monkeypatch.setattr(veomni_torch.attention, "_MOVES_16_BYTES", ("cpu",))
    monkeypatch.setattr(veomni_torch.attention, "sdpa_attention_forward", as_cudnn)
    draw = torch.Generator().manual_seed(0)
    parts = [torch.randn(2, count, keys, 16, generator=draw, dtype=torch.bfloat16) for count in (4, 2, 2)]
    mask = torch.rand(2, heads, keys, keys, generator=draw) > 0.5
    mask[..., 0], mask[1, :, 3] = True, added
    upstream = torch.randn(2, 4, keys, 16, generator=draw, dtype=torch.bfloat16).transpose(1, 2)
    given = [each.clone().requires_grad_() for each in parts]
    shown = torch.zeros(mask.shape, dtype=torch.bfloat16).masked_fill(~mask, float("-inf")) if added else mask
    found, _ = sdpa(AttentionModule(2), *given, shown)
    found.backward(upstream)
    exact = [each.double().requires_grad_() for each in parts]
    expected, _ = standard(AttentionModule(2), *exact, mask)
    expected.backward(upstream.double())
    assert found.is_contiguous() and (added or not found[1, 3].any())
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=0.02)
    for each, reference in zip(given, exact, strict=True):
        torch.testing.assert_close(each.grad.double(), reference.grad, rtol=0.02, atol=0.05)


@pytest.mark.parametrize("shape", [(1, 1, 9, 1), (2, 1, 64, 1), (1, 1, 1, 64)])
def test_masks_of_one_key_or_query_are_for_all(monkeypatch, shape):
    monkeypatch.setattr(veomni_torch.attention, "_MOVES_16_BYTES", ("cpu",))
    queries = shape[2] if shape[2] > 1 else 64
    query, key, value = (torch.randn(2, 2, count, 8, dtype=torch.bfloat16) for count in (queries, 64, 64))
    mask = torch.rand(shape) > 0.3
    found, _ = sdpa(AttentionModule(1), query.requires_grad_(), key, value, mask)
    expected, _ = sdpa(AttentionModule(1), query, key, value, mask.expand(2, 1, queries, 64).contiguous())
    assert torch.equal(found, expected)


def test_a_graph_is_exported_for_any_number_of_keys(monkeypatch):
    monkeypatch.setattr(veomni_torch.attention, "_MOVES_16_BYTES", ("cpu",))

    class Model(torch.nn.Module):
        def forward(self, query, key, value, mask):
            return sdpa(AttentionModule(1), query, key, value, mask)[0]

    def call(length):
        mask = torch.ones(1, 1, length, length, dtype=torch.bool).tril()
        return (*(torch.randn(1, 2, length, 16, dtype=torch.bfloat16) for _ in range(3)), mask)

    length = torch.export.Dim("length", min=2, max=4096)
    sizes = ({2: length}, {2: length}, {2: length}, {2: length, 3: length})
    program = torch.export.export(Model(), call(200), dynamic_shapes=sizes).module()
    for each in (192, 200):
        given = call(each)
        torch.testing.assert_close(program(*given), Model()(*given))


def test_the_gradient_of_keys_is_finite_where_incoming_ones_sum_to_more_than_float16_holds():
    query, key, value = (torch.randn(1, 8, 65, 192, dtype=torch.float16, requires_grad=True) for _ in range(3))
    output, _ = sdpa(AttentionModule(1), query, key, value, None)
    output.sum().backward()
    assert key.grad.isfinite().all()
