"""Blocks of attention on a GPU, by whichever of torch's kernels computes them, beside the exact computation."""

from __future__ import annotations

import pytest
import torch

from veomni_ops import attention_blocks
from veomni_ops.attention_blocks import TORCH, Block, _is_cudnn


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("widths", [(64, 64), (128, 128), (128, 64), (72, 72), (256, 256)])
@pytest.mark.parametrize(
    "queries, keys, block",
    [
        (1024, 1024, Block(0.2, causal=True)),
        (1024, 2048, Block(0.2)),
        (1024, 2048, Block(0.2, causal=True)),
        (1000, 1000, Block(0.2, causal=True)),
        (1024, 1024, Block(0.2, left=300)),
    ],
)
def test_outputs_and_gradients_of_two_blocks_are_the_exact_ones(dtype, widths, queries, keys, block):
    """The block is one of several: the log-sum-exp and the output that backward gets are of all keys."""
    generator = torch.Generator("cuda").manual_seed(0)

    def drawn(length, heads, width):
        # As a projection gives them: positions before heads, and a stride that is not the width's.
        return torch.randn(2, length, heads, 2 * width, device="cuda", generator=generator)[..., :width].to(dtype)

    query, key, value = drawn(queries, 8, widths[0]), drawn(keys, 2, widths[0]), drawn(keys, 2, widths[1])
    fits = queries == 1024 and block.left is None and (keys == 1024 or not block.causal)
    if widths == (64, 64) and torch.cuda.get_device_capability() == (9, 0):
        assert _is_cudnn(query, key, value, block) == fits
    output, lse = TORCH.attend(query, key, value, block)
    exact = [each.float() for each in (query, key, value)]
    wanted, its_lse = TORCH.attend(*exact, block)
    limit = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(output.float(), wanted, rtol=limit, atol=limit)
    torch.testing.assert_close(lse, its_lse, rtol=1e-4, atol=1e-4)
    upstream = drawn(queries, 8, widths[1])
    whole = (0.5 * output, lse + 0.7)
    found = TORCH.gradients(upstream, query, key, value, *whole, block)
    heads_first = upstream.transpose(1, 2).contiguous().transpose(1, 2)
    again = TORCH.gradients(heads_first, query, key, value, *whole, block)
    for mine, same in zip(found, again, strict=True):
        assert (mine.float() - same.float()).norm() < limit * mine.float().norm()
    exactly = TORCH.gradients(upstream.float(), *exact, whole[0].float(), whole[1], block)
    for mine, theirs in zip(found, exactly, strict=True):
        assert (mine.float() - theirs).norm() < 4 * limit * theirs.norm()


def test_cudnn_gets_gradients_and_outputs_in_one_layout(monkeypatch):
    """torch keeps its plan by the layouts of query, key and value, and would read another one wrongly."""
    seen = []

    def backward(up, query, key, value, out, *rest, **options):
        seen.append((up.stride(), out.stride()))
        return query, key, value

    monkeypatch.setattr(attention_blocks, "_is_cudnn", lambda *call: True)
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention_backward", backward)
    given = torch.randn(2, 6, 4, 8)
    for laid_out in (given, given.transpose(1, 2).contiguous().transpose(1, 2), given.repeat(1, 1, 1, 2)[..., :8]):
        TORCH.gradients(laid_out, given, given, given, laid_out, torch.zeros(2, 4, 6), Block(0.2))
    assert len(seen) == 3 and len(set(seen)) == 1
