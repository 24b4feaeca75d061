"""Expert-parallel modules as sites of token_dispatch: what the rule reads of them, and what it puts there and back."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from models import build
from veomni_core.changes.captured_value_change import CapturedValueChange
from veomni_core.descriptions.kernel_spec import KernelSpec
from veomni_core.discovery.discover import discover
from veomni_core.errors import BindingError
from veomni_core.planning.planner import plan_sites
from veomni_core.sites.token_dispatch import ExpertParallelModules, dispatch_site

expert_parallel = pytest.importorskip("transformers.distributed.expert_parallel")
PLACE = {"ep": 4, "tp": 2, "experts": 128, "hidden": 2048, "top_k": 8, "dtype": "bfloat16"}
SPEC = KernelSpec("acme", "token_dispatch", "exchanged", factory="veomni_core.ops.token_dispatch:exchanged")


class OneRank(expert_parallel.EPImplementation):
    """The engine's way without other ranks, and without a process group."""

    def __init__(self, module):
        self.experts_forward, self.num_local_experts = module.forward, module.num_experts
        self.ep_mesh = self.tp_mesh = SimpleNamespace(size=lambda: 1, get_group=lambda: None, get_local_rank=lambda: 0)
        self.shares_batch = False

    def __call__(self, hidden, index, weights):
        return self.experts_forward(hidden, index, weights)


def expert_parallel_model():
    model = build("qwen3_moe")
    for layer in model.model.layers:
        module = layer.mlp.experts
        module.forward = _ep_forward(OneRank(module))
    return model


def _ep_forward(implementation):
    def ep_forward(hidden_states, top_k_index, top_k_weights):
        return implementation(hidden_states, top_k_index, top_k_weights)

    return ep_forward


def found(model):
    return list(ExpertParallelModules().find(model, "expert-parallel experts"))


def test_a_model_that_no_engine_has_sharded_has_no_site():
    assert found(build("qwen3_moe")) == []


def test_a_site_says_what_its_module_is():
    first, second = found(expert_parallel_model())
    assert (first.path, second.path) == tuple(f"model.layers.{n}.mlp.experts" for n in range(2))
    assert (first.op_name, first.variant, first.own, first.dtype) == (
        "token_dispatch",
        "exchanged",
        "OneRank",
        "float32",
    )
    assert first.sizes["experts"] == (4,) and first.sizes["hidden"] == (32,) and first.sizes["ranks"] == (1,)


def test_a_site_can_be_made_from_a_layout_alone():
    site = dispatch_site("model.layers.0.mlp.experts", "expert-parallel experts", **PLACE)
    assert site.evidence == "transformers' engine: 128 experts on 4 ranks, 2 of which share a batch"
    assert (site.variant, site.own) == ("exchanged", "eager")
    assert site.sizes == {"experts": (128,), "hidden": (2048,), "ranks": (4,), "top_k": (8,)}
    plan = plan_sites([site], {"preset": "auto"}, hardware="h200", registry=discover())
    assert [d.kernel for op in plan.ops for d in op.sites] == ["alltoall_dedup"]


def test_experts_that_exchange_tokens_in_their_own_kernel_are_left_alone():
    site = dispatch_site("experts", "expert-parallel experts", **PLACE, own="MegaMoeEP")
    assert site.variant is None and "inside their own kernel" in site.evidence


def test_the_engine_s_name_is_read_as_eager():
    with pytest.warns(FutureWarning, match="engine is now called eager"):
        plan = plan_sites(
            [dispatch_site("experts", "expert-parallel experts", **PLACE)],
            {"preset": "eager", "token_dispatch_implementation": "engine"},
            hardware="h200",
        )
    assert [d.kernel for op in plan.ops for d in op.sites] == ["eager"]


def test_a_kernel_runs_with_the_module_s_experts_until_it_is_taken_out():
    model = expert_parallel_model()
    locator, module, calls = ExpertParallelModules(), model.model.layers[0].mlp.experts, []
    assert locator.reads_sharding
    site = found(model)[0]

    def kernel(hidden, index, weights, experts, ranks):
        calls.append((ranks.size, ranks.rank, ranks.local_experts))
        assert experts(hidden[:0], index[:0], weights[:0]).shape == (0, 32)
        return experts(hidden, index, weights)

    call = (torch.randn(5, 32), torch.randint(4, (5, 2)), torch.rand(5, 2))
    wanted = module.forward(*call)
    (change,) = locator.install(model, site, kernel, SPEC)
    change.apply()
    assert torch.equal(module.forward(*call), wanted) and calls == [(1, 0, 4)]
    assert change.overridden() == ""
    change.revert()
    assert torch.equal(module.forward(*call), wanted) and len(calls) == 1


def test_a_rank_without_rows_keeps_its_experts_in_the_graph():
    model = expert_parallel_model()
    module = model.model.layers[0].mlp.experts
    (change,) = ExpertParallelModules().install(
        model, found(model)[0], lambda h, i, w, experts, r: experts(h, i, w), SPEC
    )
    change.apply()
    hidden = torch.zeros(0, 32, requires_grad=True)
    module.forward(hidden, torch.zeros(0, 2, dtype=torch.long), torch.zeros(0, 2)).sum().backward()
    assert hidden.grad is not None and not module.down_proj.grad.any() and not module.gate_up_proj.grad.any()


def test_a_forward_that_was_replaced_since_is_told_and_left_alone():
    model = expert_parallel_model()
    module = model.model.layers[0].mlp.experts
    change = CapturedValueChange(module, "implementation", lambda *call: call[0])
    change.apply()
    del module.forward
    assert "was replaced" in change.overridden()
    change.revert()
    assert "forward" not in vars(module)
    with pytest.raises(BindingError, match="captures no 'implementation'"):
        CapturedValueChange(nn.Linear(2, 2), "implementation", None).apply()
