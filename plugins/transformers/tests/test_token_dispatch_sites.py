"""Expert-parallel modules as sites of token_dispatch: what the rule reads of them, and what it puts there and back."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from models import build
from veomni_core.descriptions.kernel_spec import KernelSpec
from veomni_core.discovery.discover import discover
from veomni_core.errors import BindingError
from veomni_core.planning.planner import plan_sites
from veomni_transformers.changes.captured_value_change import CapturedValueChange
from veomni_transformers.engine.engine_layout import EngineLayout
from veomni_transformers.experts.token_dispatch import ExpertParallelModules

expert_parallel = pytest.importorskip("transformers.distributed.expert_parallel")
SPEC = KernelSpec("acme", "token_dispatch", "exchanged", factory="veomni_ops.token_dispatch:exchanged")


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


def found(model, **layout):
    paths = [f"model.layers.{number}.mlp.experts" for number in range(2)]
    styles = dict.fromkeys(paths, "ep_dispatch_experts") | {f"{path}.down_proj": "grouped_gemm" for path in paths}
    layout = EngineLayout(fsdp=4, ep=4, ep_styles=styles, **layout)
    return list(ExpertParallelModules().find_divided(model, layout, "expert-parallel experts"))


def test_a_whole_model_has_no_site():
    assert list(ExpertParallelModules().find(build("qwen3_moe"), "expert-parallel experts")) == []


def test_a_site_says_what_its_module_is():
    first, second = found(build("qwen3_moe"))
    assert (first.path, second.path) == tuple(f"model.layers.{n}.mlp.experts" for n in range(2))
    assert (first.op_name, first.variant, first.own, first.dtype) == ("token_dispatch", "exchanged", "eager", "float32")
    assert first.evidence == "the engine divides its experts over 4 ranks, and exchanges tokens by auto"
    assert {name: first.sizes[name] for name in ("experts", "hidden", "ranks")} == {
        "experts": (4,),
        "hidden": (32,),
        "ranks": (4,),
    }
    plan = plan_sites([first], {"preset": "auto"}, hardware="h200", registry=discover())
    assert [d.kernel for op in plan.ops for d in op.sites] == ["alltoall_dedup"]


def test_what_the_engine_is_set_to_is_named_and_its_fused_kernel_is_left_alone():
    assert {site.own for site in found(build("qwen3_moe"), ep_implementation="all_reduce")} == {"all_reduce"}
    for site in found(build("qwen3_moe"), ep_implementation="deepgemm_megamoe"):
        assert site.variant is None and "inside their own kernel (deepgemm_megamoe)" in site.evidence


def test_the_engine_s_name_is_read_as_eager():
    config = {"preset": "eager", "token_dispatch_implementation": "engine"}
    with pytest.warns(FutureWarning, match="engine is now called eager"):
        plan = plan_sites(found(build("qwen3_moe")), config, hardware="h200")
    assert [d.kernel for op in plan.ops for d in op.sites] == ["eager", "eager"]


def test_a_kernel_runs_with_the_module_s_experts_until_it_is_taken_out():
    model = expert_parallel_model()
    locator, module, calls = ExpertParallelModules(), model.model.layers[0].mlp.experts, []
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
