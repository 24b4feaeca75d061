"""Adapters hand QuACK operands that lie as CuTe asks, wherever training left them. QuACK's calls are stand-ins."""

from __future__ import annotations

import plain_experts
import plain_loss
import plain_quack
import pytest
import torch
from cute_checks import check, lies_badly
from quack_plugin import SPECS

from veomni_conformance import check_kernel
from veomni_conformance.memory_layouts import check_memory_layouts
from veomni_conformance.subject import Subject
from veomni_ops.catalog import OPS
from veomni_ops.contract import Size, contract_for
from veomni_quack.moe_experts import token_sums

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU QuACK itself is called")
OPS = {op.name: op for op in OPS}
CASES = [pytest.param(spec, dtype, id=f"{spec}-{dtype}") for spec in SPECS for dtype in spec.dtypes]
ELEMENTWISE = [case for case in CASES if case.values[0].op_name in ("rms_norm", "rotary_pos_emb")]
ELEMENTWISE_SPECS = [spec for spec in SPECS if spec.op_name in ("rms_norm", "rotary_pos_emb")]


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch):
    for name in ("rms_norm", "rotary_pos_emb"):
        module = plain_quack.adapter(name)
        for call, stand_in in vars(plain_quack.CALLS).items():
            if hasattr(module, call):
                monkeypatch.setattr(module, call, stand_in)
    monkeypatch.setattr(plain_quack.adapter("cross_entropy_loss.operators"), "quack_calls", plain_loss.CALLS)
    monkeypatch.setattr(plain_quack.adapter("moe_experts.operators"), "grouped_gemm", plain_experts.PRODUCTS)
    monkeypatch.setattr(token_sums, "_compiled_weighted_sum", token_sums._weighted_sum)
    monkeypatch.setattr(token_sums, "_compiled_plain_sum", token_sums._plain_sum)


@pytest.mark.parametrize("place", lies_badly())
def test_the_stand_ins_refuse_what_lies_badly(place):
    with pytest.raises(ValueError, match="Misaligned Tensor data|Invalid x.strides"):
        check("x", lies_badly()[place])


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("spec, dtype", CASES)
def test_inputs_and_incoming_gradients_may_lie_anywhere(spec, dtype):
    contract = contract_for(OPS[spec.op_name], spec.variant)
    subject = Subject(spec, spec.load(), contract, torch.device("cpu"), getattr(torch, dtype))
    for position in filter(subject.is_asked_more, subject.positions(Size.SMALL)):
        if set(subject.sample(position).needs) - set(spec.features):
            continue  # the kernel has to raise, as the conformance check asks
        assert not list(check_memory_layouts(subject, position)), subject.sample(position).name


@pytest.mark.thorough(one_per=["spec"])
@pytest.mark.parametrize("spec, dtype", ELEMENTWISE)
def test_conformance(spec, dtype):
    check_kernel(spec, "cpu", dtype, largest=Size.SMALL, every_form=False).raise_if_failed()


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("spec", ELEMENTWISE_SPECS, ids=str)
def test_compiles_without_a_graph_break(spec):
    torch._dynamo.reset()
    kernel = spec.load()
    sample = next(contract_for(OPS[spec.op_name], spec.variant).samples(torch.device("cpu"), torch.bfloat16))
    leaves = [tensor for tensor in sample.args if isinstance(tensor, torch.Tensor) and tensor.requires_grad]

    def run(call):
        results = call(*sample.args)
        results = results if isinstance(results, tuple) else (results,)
        upstream = [torch.ones_like(result) for result in results]
        return *(result.detach() for result in results), *torch.autograd.grad(results, leaves, upstream)

    compiled = torch.compile(kernel, fullgraph=True, backend="aot_eager")
    for mine, theirs in zip(run(compiled), run(kernel), strict=True):
        assert torch.equal(mine, theirs) and mine.stride() == theirs.stride()


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("spec", ELEMENTWISE_SPECS, ids=str)
def test_one_graph_takes_aligned_and_misaligned_addresses(spec):
    """What is known of an operand when it is traced is not where it will lie."""
    torch._dynamo.reset()
    kernel = spec.load()
    sample = next(contract_for(OPS[spec.op_name], spec.variant).samples(torch.device("cpu"), torch.bfloat16))
    compiled = torch.compile(
        lambda *args: kernel(*args, *sample.args[len(args) :]), fullgraph=True, backend="aot_eager"
    )
    x = sample.args[0].detach()
    elsewhere = x.new_zeros(x.numel() + 1)[1:].view(x.shape).copy_(x)
    for mine, theirs in zip(compiled(x), compiled(elsewhere), strict=True):
        assert torch.equal(mine, theirs)


def test_what_lies_well_is_not_copied(monkeypatch):
    module, seen = plain_quack.adapter("rms_norm"), []
    monkeypatch.setattr(
        module, "rmsnorm_fwd", lambda x, w, **options: seen.extend((x, w)) or plain_quack.rmsnorm_fwd(x, w, **options)
    )
    packed, weight = torch.randn(3, 5, 64), torch.randn(32)
    for x in (packed[..., :32], packed[..., 32:]):
        module.cast_after(x, weight, 1e-6)
    assert {each.untyped_storage().data_ptr() for each in seen} == {
        each.untyped_storage().data_ptr() for each in (packed, weight)
    }
