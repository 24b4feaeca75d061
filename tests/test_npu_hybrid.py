"""Hybrid models on the simulated NPU: gated norms run torch_npu's operators, and convolutions veomni-torch's kernel."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

from models import step
from tiny_models import tiny_model
from veomni_conformance import check_kernel
from veomni_core import bind, discover
from veomni_ops.contract import Size
from veomni_torch.plugin import veomni_kernels

# A model type of each variant of the gated norm.
TYPES = {"qwen3_next": "standard", "kimi_linear": "sigmoid", "nemotron_h": "gate_first"}
CHOSEN = {"rms_norm_gated": "npu", "causal_conv1d": "torch"}
CONVOLUTIONS = [
    pytest.param(spec, dtype, id=f"{spec}-{dtype}")
    for spec in veomni_kernels()
    if spec.op_name == "causal_conv1d" and spec.hardware.device_type != "cpu"
    for dtype in spec.dtypes
]
LENGTHS = [5, 1, 7]


@pytest.fixture
def registry(npu):
    return discover({"VEOMNI_PLUGINS": "veomni-npu,veomni-torch"})


def draw(*shape):
    return torch.randint(3, 90, shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("model_type", TYPES)
def test_loss_and_gradients_are_those_of_the_cpu(model_type, registry):
    eager, ids = tiny_model(model_type, torch.float32), draw(2, 12)
    model = copy.deepcopy(eager).to("npu")
    wanted, gradients = step(eager, ids)
    with bind(model, {"preset": "auto"}, registry=registry) as binding:
        found, own_gradients = step(model, ids.to("npu"))
        sites = {op.op_name: op.sites for op in binding.plan.ops if op.op_name in CHOSEN}
    assert {op: {site.kernel for site in sites[op]} for op in CHOSEN} == {op: {name} for op, name in CHOSEN.items()}
    assert {decision.site.variant for decision in sites["rms_norm_gated"]} == {TYPES[model_type]}
    torch.testing.assert_close(found.cpu(), wanted, rtol=1e-5, atol=0)
    assert own_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        off = (own_gradients[name].cpu() - gradient).norm()
        assert off <= 1e-4 * gradient.norm() + 1e-6, name


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("told_by", ["position_ids", "cu_seq_lens on the host"])
@pytest.mark.parametrize("model_type", TYPES)
def test_packed_documents_stay_apart(model_type, told_by, registry):
    model, ids = tiny_model(model_type, torch.float32).eval().to("npu"), draw(1, sum(LENGTHS)).to("npu")
    boundaries = {"position_ids": torch.cat([torch.arange(length) for length in LENGTHS])[None].to("npu")}
    if told_by != "position_ids":
        ends = torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32)
        longest = {"max_length_q": max(LENGTHS), "max_length_k": max(LENGTHS)}
        boundaries |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, **longest}
    with bind(model, {"preset": "auto"}, registry=registry), torch.no_grad():
        packed = model(ids, **boundaries, use_cache=False).logits
        apart = torch.cat([model(part, use_cache=False).logits for part in ids.split(LENGTHS, dim=1)], dim=1)
    torch.testing.assert_close(packed.cpu(), apart.cpu(), rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("spec, dtype", CONVOLUTIONS)
def test_the_convolution_meets_its_contract_there(npu, spec, dtype):
    check_kernel(spec, npu, dtype, largest=Size.BEYOND_A_TILE).raise_if_failed()
