"""A plan is for one model: what differs from what it proved is refused by name, before anything is changed."""

from __future__ import annotations

import copy
import pickle
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from models import assert_equal_steps, build, step
from veomni_core import Plan, apply_plan, bind, binding_of, make_plan
from veomni_core.errors import PlanForAnotherModelError
from veomni_core.sites.find import find_sites

AUTO = {"preset": "auto"}
FEW = pytest.mark.thorough(one_per=[])
FAMILIES = ["llama", *(pytest.param(family, marks=FEW) for family in ("qwen3_moe", "gemma3_text", "phi3", "mixtral"))]
_EPS = ("variance_epsilon", "eps")


def first(model, name):
    return next(module for path, module in model.named_modules() if path.endswith(name))


def other_eps(model):
    norm = model.model.layers[1].input_layernorm
    setattr(norm, next(name for name in _EPS if hasattr(norm, name)), 0.5)


def other_activation(model):
    holder = next(m for m in model.modules() if {"act_fn", "activation_fn"} & m._modules.keys())
    setattr(holder, next(iter({"act_fn", "activation_fn"} & holder._modules.keys())), nn.ReLU())


def other_norm(model):
    model.model.norm = nn.LayerNorm(32)


def other_dtype(model):
    model.to(torch.bfloat16)


def fewer_layers(model):
    del model.model.layers[1]


def more_layers(model):
    model.model.layers.append(copy.deepcopy(model.model.layers[1]))


def other_head(model):
    model.lm_head = nn.Linear(32, 96, bias=False)


CHANGES = {
    other_eps: r"rms_norm at model\.layers\.1\.input_layernorm: planned with eps 1e-0\d, and here it has eps 0\.5",
    other_activation: r"(swiglu_mlp|moe_experts) at model\.layers\.0\.mlp.*: planned as .*, and here it is not proven",
    other_norm: r"rms_norm at model\.norm: planned as rms_norm/\w+, and this model has no such site",
    other_dtype: "planned with dtype float32, and here it has dtype bfloat16",
    fewer_layers: r"at model\.layers\.1\.\w+: planned as .*, and this model has no such site",
    more_layers: r"at model\.layers\.2\.\w+: .* here, and the plan has no such site",
    other_head: r"cross_entropy_loss at the model: planned .*and here it (has vocabulary \[96\]|is not proven)",
}


def refused(plan, model, *messages):
    before = [(path, type(module), dict(vars(module))) for path, module in model.named_modules()]
    with pytest.raises(PlanForAnotherModelError) as raised:
        apply_plan(model, plan)
    assert [(path, type(module), dict(vars(module))) for path, module in model.named_modules()] == before
    assert all(re.search(message, str(raised.value)) for message in messages), str(raised.value)


def test_a_model_that_was_changed_since_is_refused_with_each_difference():
    model = build("llama")
    plan = make_plan(model, AUTO)
    at_once = (other_eps, other_activation, other_norm, other_head)
    for change in at_once:
        change(model)
    refused(Plan.from_json(plan.to_json()), model, *(CHANGES[change] for change in at_once))


@FEW
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma3_text", "phi3", "mixtral"])
def test_every_change_is_refused_by_name(family):
    plan = make_plan(build(family), AUTO)
    for change, message in CHANGES.items():
        model = build(family)
        change(model)
        refused(plan, model, message)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plan_from_a_file_made_on_meta_is_for_the_real_model(family):
    with torch.device("meta"):
        plan = Plan.from_json(make_plan(build(family), AUTO, hardware="cpu").to_json())
    model, eager = build(family), build(family)
    apply_plan(model, plan)
    assert_equal_steps(step(model), step(eager))


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"rms_norm_eps": 0.3}, marks=FEW),
        pytest.param({"hidden_act": "gelu_pytorch_tanh"}, marks=FEW),
        pytest.param({"intermediate_size": 64}, marks=FEW),
        pytest.param({"num_hidden_layers": 1}, marks=FEW),
        pytest.param({"attention_dropout": 0.1}, marks=FEW),
    ],
    ids=str,
)
def test_a_model_of_another_config_is_refused(settings):
    with pytest.raises(PlanForAnotherModelError, match="the plan is not for this LlamaForCausalLM"):
        apply_plan(build("llama", **settings), make_plan(build("llama"), AUTO))


@FEW
@pytest.mark.parametrize("family", ["gemma3_text", "qwen3", "phi3", "mixtral", "olmo2"])
def test_a_model_of_another_family_is_refused(family):
    with pytest.raises(PlanForAnotherModelError):
        apply_plan(build(family), make_plan(build("llama"), AUTO))


def test_what_decides_nothing_of_the_sites_is_no_difference():
    """A config's value that no module reads any more, frozen weights, evaluation, and another class of equal code."""
    model, eager = build("llama"), build("llama")
    plan = make_plan(model, AUTO)
    for each in (model, eager):
        each.config.hidden_act = "gelu"
        each.model.embed_tokens.weight.requires_grad_(False)
        norm = each.model.norm
        norm.__class__ = type("OtherRMSNorm", (type(norm),), {})
    apply_plan(model.eval(), plan)
    assert_equal_steps(step(model.train()), step(eager))


def test_code_that_was_replaced_since_the_plan_is_proven_again(monkeypatch):
    model = build("llama")
    plan, norm = make_plan(model, AUTO), type(model.model.norm)
    own = norm.forward
    monkeypatch.setattr(norm, "forward", lambda self, hidden_states: own(self, hidden_states) * 2)
    with pytest.raises(PlanForAnotherModelError, match=r"planned as rms_norm/standard, and here it is not proven"):
        apply_plan(model, plan)
    assert binding_of(model) is None


def test_a_rule_that_is_not_installed_here_is_named():
    model = build("llama")
    plan = make_plan(model, AUTO)
    text = plan.to_json().replace("gated MLP modules", "rule of somebody else")
    with pytest.raises(PlanForAnotherModelError, match=r"swiglu_mlp at model\.layers\.0\.mlp: planned as"):
        apply_plan(model, Plan.from_json(text))


def test_the_model_that_was_planned_is_not_searched_again(monkeypatch):
    model = build("llama")
    plan = make_plan(model, AUTO)
    monkeypatch.setattr("veomni_core.binding.planned_model.search", None)
    for _ in range(2):  # undo leaves it as it was
        apply_plan(model, plan).undo()
    model.config.rms_norm_eps = 0.5  # decides nothing any more, which a description can't tell
    with pytest.raises(TypeError, match="not callable"):
        apply_plan(model, plan)
    assert binding_of(model) is None


def test_a_plan_that_was_copied_out_of_the_process_knows_no_model():
    plan = make_plan(build("llama"), AUTO)
    assert plan.proven is not None
    assert pickle.loads(pickle.dumps(plan)).proven is None
    assert Plan.from_json(plan.to_json()).proven is None
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_a_plan_whose_sites_were_edited_is_compared_by_a_search():
    model = build("llama")
    plan = make_plan(model, AUTO)
    norms = next(op for op in plan.ops if op.op_name == "rms_norm")
    decisions = tuple(replace(each, site=replace(each.site, detail={"eps": 0.5})) for each in norms.sites)
    ops = tuple(replace(op, sites=decisions) if op is norms else op for op in plan.ops)
    refused(replace(plan, ops=ops), model, "planned with eps 0.5")


def test_bind_itself_does_not_look_twice(monkeypatch):
    searches = []
    monkeypatch.setattr("veomni_core.binding.planned_model.search", lambda *args: searches.append(args))
    bind(build("llama"), AUTO)
    assert not searches


@pytest.mark.thorough
@FEW
def test_a_plan_of_another_process_is_compared():
    script = (
        "from models import build; from veomni_core import make_plan; "
        "print(make_plan(build('llama'), {'preset': 'auto'}).to_json())"
    )
    folder = Path(__file__).parent
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=folder, check=True)
    plan = Plan.from_json(done.stdout)
    assert apply_plan(build("llama"), plan).active
    with pytest.raises(PlanForAnotherModelError):
        apply_plan(build("llama", rms_norm_eps=0.1), plan)


def test_a_plan_is_applied_again_after_undo():
    model = build("llama")
    binding = bind(model, AUTO)
    binding.undo()
    assert apply_plan(model, binding.plan).active and find_sites(build("llama"))
