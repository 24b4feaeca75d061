"""Float32 weights under autocast on a GPU: QuACK's products run in its dtype, and gradients come back in float32."""

from __future__ import annotations

import pytest
import torch
from quack_plugin import SPECS, spec_of

from veomni_ops import cross_entropy_loss, moe_experts, rms_norm

pytestmark = pytest.mark.gpu


def leaf(*shape, scale=1.0, dtype=torch.float32, seed=0):
    values = scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return values.to("cuda", dtype).requires_grad_()


CALLS = {
    "cross_entropy_loss": (
        spec_of("cross_entropy_loss", "causal"),
        cross_entropy_loss.causal,
        lambda op: lambda h, w: op(h, w, torch.arange(300, device="cuda") % 200),
        [(300, 64), (200, 64)],
    ),
    "moe_experts": (
        spec_of("moe_experts", "standard"),
        moe_experts.standard,
        lambda op: lambda h, w, u, d: op(h, torch.arange(128, device="cuda").view(64, 2) % 4, w, u, d),
        [(64, 64), (64, 2), (4, 64, 64), (4, 64, 32)],
    ),
}


@pytest.mark.parametrize("spec, reference, call, shapes", CALLS.values(), ids=CALLS)
def test_float32_inputs_are_multiplied_in_autocasts_dtype(spec, reference, call, shapes):
    inputs = [leaf(*shape, scale=shape[-1] ** -0.5, seed=seed) for seed, shape in enumerate(shapes)]
    wanted = call(reference)(*inputs)
    with torch.autocast("cuda", torch.bfloat16):
        found = call(spec.load())(*inputs)
    upstream = torch.randn_like(wanted)
    results = [(result, *torch.autograd.grad(result, inputs, upstream)) for result in (found, wanted)]
    for mine, theirs in zip(*results, strict=True):
        assert mine.dtype == torch.float32
        assert (mine - theirs).norm() <= 1.6e-2 * theirs.norm()


@pytest.mark.parametrize("spec", [s for s in SPECS if s.op_name == "rms_norm" and s.variant != "unweighted"], ids=str)
def test_a_norm_with_a_float32_weight_takes_what_a_projection_gives_in_bfloat16(spec):
    x, weight = leaf(40, 256, dtype=torch.bfloat16), leaf(256, seed=1)
    found, wanted = (norm(x, weight, 1e-6) for norm in (spec.load(), getattr(rms_norm, spec.variant)))
    upstream = torch.randn_like(wanted)
    assert found.dtype == wanted.dtype
    results = [(result, *torch.autograd.grad(result, (x, weight), upstream)) for result in (found, wanted)]
    for mine, theirs in zip(*results, strict=True):
        assert mine.dtype == theirs.dtype
        assert (mine.double() - theirs.double()).norm() <= 6e-3 * theirs.double().norm()
