"""Which hybrid models may train on packed documents, unbound and bound: every type, by value and by gradient."""

from __future__ import annotations

import pytest
import torch

from models import step
from test_hybrid_convolutions import LENGTHS, TYPES, hybrid, tokens
from veomni_core import bind
from veomni_core.errors import ConfigError
from veomni_trainer.data.boundaries import boundaries
from veomni_trainer.setup.packing import needs_boundaries

KERNELS = {
    "preset": "eager",
    "causal_conv1d_implementation": "auto",
    "chunk_gated_delta_rule_implementation": "auto",
    "mamba2_scan_implementation": "auto",
}
# Beside attention, only convolutions, delta rules and scans of Mamba 2 mix along the sequence here. The others have a
# scan of Mamba's first version, or Kimi's delta attention, for which there is no kernel that reads boundaries. Mamba2's
# causal model hands its mixers nothing that says where a document ends.
RIGHT = {
    *("lfm2", "lfm2_moe", "lfm3"),
    *("olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
    *("bamba", "falcon_h1", "granitemoehybrid", "nemotron_h", "zamba2"),
}


@pytest.mark.parametrize("model_type", TYPES)
def test_a_type_may_be_packed_if_kernels_read_its_boundaries(model_type):
    model = hybrid(model_type)
    with pytest.raises(ConfigError, match=r"data\.packing: "):
        needs_boundaries(model, batch_size=1)
    with bind(model, KERNELS):
        if model_type in RIGHT:
            assert needs_boundaries(model, batch_size=1)
        else:
            with pytest.raises(ConfigError, match=r"data\.packing: "):
                needs_boundaries(model, batch_size=1)


@pytest.mark.parametrize("model_type", sorted(RIGHT - {"lfm2", "lfm2_moe", "lfm3"}))
def test_packed_equals_separate_in_logits_and_every_gradient(model_type):
    model, row = hybrid(model_type), tokens(1, sum(LENGTHS))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    bind(model, KERNELS)
    packed = model(row, position_ids=positions, use_cache=False, **boundaries(positions)).logits
    separate = torch.cat([model(part, use_cache=False).logits for part in row.split(LENGTHS, dim=1)], dim=1)
    torch.testing.assert_close(packed, separate, rtol=1e-4, atol=1e-5)
    packed.square().mean().backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    separate.square().mean().backward()
    for name, gradient in found.items():
        wanted = model.get_parameter(name).grad
        assert (gradient - wanted).norm() <= 1e-4 * wanted.norm() + 1e-7, name


@pytest.mark.parametrize("model_type", sorted(RIGHT & {"bamba", "olmo_hybrid", "qwen3_5_text", "qwen3_next"}))
def test_with_all_its_kernels_a_hybrid_trains_as_the_eager_one(model_type):
    model, ids = hybrid(model_type), tokens(2, 13)
    wanted = step(model, ids)
    with bind(model, {**KERNELS, "rms_norm_gated_implementation": "auto", "rms_norm_implementation": "auto"}):
        found = step(model, ids)
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-5, atol=1e-6)
    for name, gradient in wanted[1].items():
        assert (found[1][name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-7, name
