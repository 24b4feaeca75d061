"""Float32 weights under autocast: in the interpreter in float16, since that multiplies no bfloat16, and on a GPU."""

from __future__ import annotations

import pytest
import torch

from veomni_liger import cross_entropy_loss, moe_experts, rotary_pos_emb
from veomni_ops import cross_entropy_loss as loss_reference
from veomni_ops import head_chunks
from veomni_ops import moe_experts as experts_reference
from veomni_ops import rotary_pos_emb as rotary_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# What each rounding of a value may cost, with room for a handful of them.
ROUNDINGS = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


def _leaf(*shape, scale=1.0, dtype=torch.float32):
    return (scale * torch.randn(*shape, device=DEVICE)).to(dtype).requires_grad_()


def _routes(tokens, experts):
    return torch.arange(2 * tokens, device=DEVICE).view(tokens, 2) % experts


CALLS = {
    "causal": (
        lambda op: lambda h, w, b: op.causal(h, w, torch.arange(9, device=DEVICE) % 11, b, scale=0.5),
        (cross_entropy_loss, loss_reference),
        [(9, 16), (11, 16), (11,)],
    ),
    "experts": (
        lambda op: lambda h, w, u, d: op.standard(h, _routes(7, 4), w, u, d),
        (moe_experts, experts_reference),
        [(7, 16), (7, 2), (4, 32, 16), (4, 16, 16)],
    ),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("call, ops, shapes", CALLS.values(), ids=CALLS)
def test_float32_inputs_are_multiplied_in_autocasts_dtype(call, ops, shapes, dtype):
    torch.manual_seed(0)
    inputs = [_leaf(*shape, scale=0.5) for shape in shapes]
    wanted = call(ops[1])(*inputs)
    with torch.autocast(DEVICE, dtype):
        found = call(ops[0])(*inputs)
    upstream = torch.randn_like(wanted)
    results = [(result, *torch.autograd.grad(result, inputs, upstream)) for result in (found, wanted)]
    for mine, theirs in zip(*results, strict=True):
        assert mine.dtype == torch.float32
        assert (mine - theirs).norm() <= ROUNDINGS[dtype] * theirs.norm()
    # Computed in float32, gradients would differ by a hundredth of that.
    assert any((mine - theirs).norm() > 1e-5 * theirs.norm() for mine, theirs in zip(*results, strict=True))


@pytest.mark.parametrize("call, ops, shapes", CALLS.values(), ids=CALLS)
def test_operands_of_several_dtypes_are_refused(call, ops, shapes):
    first, *others = shapes
    with pytest.raises(TypeError, match="multiplies tensors of one dtype, but hidden is float16"):
        call(ops[0])(_leaf(*first, dtype=torch.float16), *(_leaf(*shape) for shape in others))


@pytest.mark.parametrize("heads, angles", [(torch.float16, torch.float32), (torch.float32, torch.float16)])
def test_a_rotation_is_computed_in_the_wider_dtype_of_heads_and_angles(heads, angles):
    torch.manual_seed(0)
    q, k = _leaf(1, 2, 5, 16, dtype=heads), _leaf(1, 1, 5, 16, dtype=heads)
    turned = torch.randn(1, 5, 8, device=DEVICE).repeat(1, 1, 2)
    cos, sin = turned.cos().to(angles), turned.sin().to(angles)
    found, wanted = (op.full(q, k, cos, sin) for op in (rotary_pos_emb, rotary_reference))
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.dtype == theirs.dtype
        # In float32 up to its rounding; where it is rounded to float16 at the end, to the same number.
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6 if heads == torch.float32 else 0)


def test_a_weights_gradient_in_float16_is_summed_where_it_cannot_overflow(monkeypatch):
    """Half of the tokens have one label, and hidden states of 800: their sum is above 65504, their mean is not."""
    monkeypatch.setattr(head_chunks, "LOGITS_BYTES", 1)  # two chunks
    tokens, scale = 256, 64.0
    torch.manual_seed(0)
    hidden, weight, labels = torch.randn(tokens, 16), torch.randn(8, 16) * 1e-3, torch.randint(0, 8, (tokens,))
    labels[::2], hidden[::2] = 7, hidden[::2] + 800.0

    def gradients(op, dtype, factor):
        leaves = [tensor.to(DEVICE, dtype).requires_grad_() for tensor in (hidden, weight)]
        found = torch.autograd.grad(op.causal(*leaves, labels.to(DEVICE)) * factor, leaves)
        return [gradient.double() / factor for gradient in found]

    exact = gradients(loss_reference, torch.float32, 1.0)
    assert exact[1].abs().max() * tokens > torch.finfo(torch.float16).max
    allowed = loss_reference.GRADIENTS["float16"].norm
    for mine, true in zip(gradients(cross_entropy_loss, torch.float16, scale), exact, strict=True):
        assert (mine - true).norm() <= allowed * true.norm()


def test_experts_in_float32_outside_of_autocast_are_refused():
    """A plan for autocast may bind them to float32 weights; there they would be multiplied as TF32."""
    call, _, shapes = CALLS["experts"]
    with pytest.raises(TypeError, match="fused_liger computes bfloat16 or float16, not float32: run it under autocast"):
        call(moe_experts)(*(_leaf(*shape) for shape in shapes))
