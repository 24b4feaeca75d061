"""Binding: per instance, exact, reversible, and kept through what training does to a model."""

from __future__ import annotations

import copy
import io
import logging
import pickle
import sys
import types

import pytest
import torch
import transformers
from packaging.version import Version
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

from counting_kernels import calls, counting_registry
from models import EVERY_KERNEL, FAMILIES, build, step, tokens
from veomni_core import KernelSpec, OpsConfig, bind, binding_of, find_sites, make_plan
from veomni_core.errors import BindingError, BoundModelPickleError, ConformanceError, KernelLoadError
from veomni_core.ops import cross_entropy_loss

REGISTRY = counting_registry("one")


@pytest.fixture(autouse=True)
def _fresh_counts():
    calls.clear()


def assert_equal_steps(found, wanted):
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-6, atol=1e-6)
    assert found[1].keys() == wanted[1].keys()
    for name, gradient in wanted[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def assert_same_bits(found, wanted):
    assert torch.equal(found[0], wanted[0])
    assert found[1].keys() == wanted[1].keys()
    assert all(torch.equal(found[1][name], gradient) for name, gradient in wanted[1].items())


EXPECTED_VARIANTS = {
    "llama": {"rms_norm": "standard", "rotary_pos_emb": "full", "swiglu_mlp": "standard"},
    "qwen2": {"rms_norm": "standard", "rotary_pos_emb": "full", "swiglu_mlp": "standard"},
    "qwen3": {"rms_norm": "standard", "rotary_pos_emb": "full", "swiglu_mlp": "standard"},
    "qwen3_moe": {"rms_norm": "standard", "rotary_pos_emb": "full", "moe_experts": "standard"},
    "mixtral": {"rms_norm": "standard", "rotary_pos_emb": "full", "moe_experts": "standard"},
    "deepseek_v3": {"rms_norm": "standard", "rotary_pos_emb": "deinterleaved", "moe_experts": "standard"},
    "seed_oss": {"rms_norm": "standard", "rotary_pos_emb": "full", "swiglu_mlp": "standard"},
    "gemma3_text": {"rms_norm": "offset", "rotary_pos_emb": "full", "swiglu_mlp": "gelu_tanh"},
    "olmo2": {"rms_norm": "cast_after", "rotary_pos_emb": "full", "swiglu_mlp": "standard"},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_every_site_is_found_and_its_variant_proven(family, device):
    with torch.device(device):
        model = build(family)
    found = {}
    for site in find_sites(model, REGISTRY):
        found.setdefault(site.op_name, set()).add(site.variant)
    for op, variant in EXPECTED_VARIANTS[family].items():
        assert found[op] == {variant}, op
    assert found["cross_entropy_loss"] == {"causal"} and found["attention"] == {"standard"}
    norms = [module for module in model.modules() if "RMSNorm" in type(module).__name__]
    assert len([site for site in find_sites(model, REGISTRY) if site.op_name == "rms_norm"]) == len(norms)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_bound_model_matches_its_eager_twin_in_loss_and_every_gradient(family):
    model = build(family)
    twin = copy.deepcopy(model)
    keys = list(model.state_dict())
    binding = bind(model, EVERY_KERNEL, registry=REGISTRY)
    assert_equal_steps(step(model), step(twin))
    for op in binding.plan.ops:
        for decision in op.sites:
            if decision.bound:
                assert calls[(op.op_name, decision.site.variant, "one")] > 0, decision
    assert list(model.state_dict()) == keys
    binding.undo()
    assert_same_bits(step(model), step(twin))


def test_two_models_of_one_class_run_their_own_kernels_interleaved():
    eager, one, two = (build("qwen3_moe") for _ in range(3))
    registry = counting_registry("one", "two")
    bind(one, {"preset": "eager", "moe_implementation": "one", "rms_norm_implementation": "one"}, registry=registry)
    bind(two, {"preset": "eager", "moe_implementation": "two"}, registry=registry)
    wanted = step(eager)
    for _ in range(2):
        for model, expected in (
            (eager, {}),
            (one, {("rms_norm", "standard", "one"): 9, ("moe_experts", "standard", "one"): 2}),
            (two, {("moe_experts", "standard", "two"): 2}),
        ):
            calls.clear()
            assert_equal_steps(step(model), wanted)
            assert calls == expected


def _snapshot():
    """Every attribute of every loaded transformers and torch module and class, by identity."""
    seen = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] not in ("transformers", "torch") or not isinstance(module, types.ModuleType):
            continue
        for attribute, value in list(vars(module).items()):
            seen[(name, attribute)] = id(value)
            if isinstance(value, type) and value.__module__ == name:
                seen.update({(name, attribute, inner): id(v) for inner, v in list(vars(value).items())})
            if type(value) is dict and attribute.isupper():
                seen.update({(name, attribute, str(key)): id(v) for key, v in value.items()})
    return seen


def test_binding_changes_nothing_of_transformers_or_torch():
    model, warm_up = build("qwen3_moe"), build("qwen3_moe")
    bind(warm_up, {**EVERY_KERNEL, "attn_implementation": "eager"}, registry=REGISTRY)
    step(warm_up)
    config_before = copy.deepcopy(vars(model.config))
    shared_config = model.config
    before = _snapshot()
    binding = bind(model, {**EVERY_KERNEL, "attn_implementation": "eager"}, registry=REGISTRY)
    step(model)
    after = _snapshot()
    changed = {key for key in before if after.get(key) != before[key]} | (after.keys() - before.keys())
    # Counters and caches of torch's own that any forward and backward moves.
    changed = {
        key for key in changed if key[-1] != "next_id" and not key[1].startswith("_") and "logging" not in key[0]
    }
    assert not changed
    binding.undo()
    assert vars(shared_config) == config_before and model.config is shared_config


def test_a_config_object_that_two_models_share_is_not_changed():
    one = build("llama", attn_implementation="sdpa")
    two = type(one)(one.config)
    two.config = one.config
    for module in (one, two):
        for part in module.modules():
            if hasattr(part, "config"):
                part.config = one.config
    binding = bind(one, {"preset": "eager"}, registry=REGISTRY)
    assert one.config._attn_implementation == "eager"
    assert two.config._attn_implementation == "sdpa"
    binding.undo()
    assert one.config is two.config


def test_undo_as_a_context_manager_and_only_once():
    model = build("llama")
    with bind(model, EVERY_KERNEL, registry=REGISTRY) as binding:
        assert binding_of(model) is binding and binding.active
    assert binding_of(model) is None and not binding.active
    assert not [name for m in model.modules() for name in vars(m) if name == "forward" or name.startswith("_veomni")]
    with pytest.raises(BindingError, match="undone before"):
        binding.undo()


def test_undo_refuses_to_lose_what_others_changed_since():
    model = build("llama")
    binding = bind(model, EVERY_KERNEL, registry=REGISTRY)
    norm = model.model.norm
    norm.forward = ours = types.MethodType(lambda self, x: x, norm)
    with pytest.raises(
        BindingError, match="undo would lose changes made after bind: LlamaRMSNorm.forward was replaced"
    ):
        binding.undo()
    assert binding.active and norm.forward is ours


def test_binding_twice_is_refused():
    model = build("llama")
    bind(model, EVERY_KERNEL, registry=REGISTRY)
    with pytest.raises(BindingError, match="bound already"):
        bind(model, EVERY_KERNEL, registry=REGISTRY)


def test_use_kernels_is_refused():
    model = build("llama")
    model._use_kernels = True
    with pytest.raises(BindingError, match="use_kernels=True"):
        bind(model, EVERY_KERNEL, registry=REGISTRY)


@pytest.mark.parametrize("family", FAMILIES)
def test_compile_fullgraph(family):
    if "moe_experts" in EXPECTED_VARIANTS[family] and Version(transformers.__version__) < Version("5.20"):
        pytest.skip("before 5.20 transformers' own experts don't compile on a CPU, bound or not")
    torch._dynamo.reset()
    model, eager, ids = build(family), build(family), tokens()
    bind(model, {**EVERY_KERNEL, "moe_implementation": "eager"}, registry=REGISTRY)
    if "moe_experts" in EXPECTED_VARIANTS[family]:
        # The eager loop over experts asks for values, which no graph can hold; transformers' own grouped_mm can.
        model.set_experts_implementation("grouped_mm")
    # transformers installs its output recorders in the first forward, under a lock that dynamo doesn't trace.
    step(model, ids)
    model.zero_grad()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    compiled(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for name, gradient in step(eager)[1].items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5)
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled(input_ids=ids, labels=ids, use_cache=False)


def test_a_bound_and_an_unbound_model_don_t_recompile_each_other():
    torch._dynamo.reset()
    model, eager, ids = build("llama"), build("llama"), tokens()
    bind(model, EVERY_KERNEL, registry=REGISTRY)
    for one in (model, eager):
        step(one, ids)
        one.zero_grad()
    bound, unbound = (torch.compile(m, backend="aot_eager", fullgraph=True) for m in (model, eager))
    first = bound(input_ids=ids, labels=ids, use_cache=False).loss, unbound(input_ids=ids, labels=ids).loss
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            again = bound(input_ids=ids, labels=ids, use_cache=False).loss, unbound(input_ids=ids, labels=ids).loss
            assert [float(loss) for loss in again] == [float(loss) for loss in first]


def test_deepcopy_gives_a_bound_model_of_its_own():
    model = build("qwen3_moe")
    twin_eager = copy.deepcopy(model)
    bind(model, EVERY_KERNEL, registry=REGISTRY)
    twin = copy.deepcopy(model)
    calls.clear()
    assert_same_bits(step(twin), step(model))
    assert calls[("moe_experts", "standard", "one")] == 4
    assert binding_of(twin) is not binding_of(model) and binding_of(twin).model is twin
    binding_of(model).undo()
    calls.clear()
    step(twin)
    assert calls[("moe_experts", "standard", "one")] == 2
    binding_of(twin).undo()
    assert_same_bits(step(twin), step(twin_eager))


def test_pickling_says_why_not():
    model = build("llama")
    binding = bind(model, EVERY_KERNEL, registry=REGISTRY)
    for part in (model, model.model.layers[0], model.model.norm, binding):
        with pytest.raises(BoundModelPickleError, match=r"kernels would silently be lost. Save model.state_dict\(\)"):
            pickle.dumps(part)
    with pytest.raises(BoundModelPickleError):
        torch.save(model, io.BytesIO())
    binding.undo()
    pickle.dumps(model)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing(use_reentrant):
    model, eager = build("qwen3_moe"), build("qwen3_moe")
    bind(model, EVERY_KERNEL, registry=REGISTRY)
    for each in (model, eager):
        each.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        each.enable_input_require_grads()
    assert_equal_steps(step(model), step(eager))
    assert calls[("moe_experts", "standard", "one")] == 4


@pytest.mark.parametrize("when", ["before", "after"])
def test_lora(when):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=4, target_modules=["gate_proj", "down_proj", "q_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )

    def adapted(model):
        torch.manual_seed(7)
        return peft.get_peft_model(model, config)

    eager = adapted(build("llama"))
    if when == "before":
        model = adapted(build("llama"))
        bind(model, EVERY_KERNEL, registry=REGISTRY)
    else:
        model = build("llama")
        bind(model, EVERY_KERNEL, registry=REGISTRY)
        model = adapted(model)
    assert_equal_steps(step(model), step(eager))
    for op in ("swiglu_mlp", "rms_norm", "rotary_pos_emb"):
        assert any(key[0] == op for key in calls), op
    assert any(key[0] == "cross_entropy_loss" for key in calls)


def test_lora_on_the_output_projection_gets_the_logits_it_adds_to():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False, task_type="CAUSAL_LM")
    models = [build("llama"), build("llama")]
    bind(models[0], EVERY_KERNEL, registry=REGISTRY)
    for index, model in enumerate(models):
        torch.manual_seed(7)
        models[index] = peft.get_peft_model(model, config)
    assert_equal_steps(*[step(model) for model in models])


def test_save_and_reload_with_unchanged_keys(tmp_path):
    model = build("qwen3_moe")
    bind(model, EVERY_KERNEL, registry=REGISTRY)
    model.save_pretrained(tmp_path)
    reloaded = type(model).from_pretrained(tmp_path).train()
    bind(reloaded, EVERY_KERNEL, registry=REGISTRY)
    assert_same_bits(step(reloaded), step(model))


def test_evaluation_and_generation_give_real_logits():
    model, eager = build("llama").eval(), build("llama").eval()
    bind(model, EVERY_KERNEL, registry=REGISTRY)
    ids = tokens()
    found, wanted = model(input_ids=ids, labels=ids), eager(input_ids=ids, labels=ids)
    assert isinstance(found.logits, torch.Tensor)
    torch.testing.assert_close(found.logits, wanted.logits)
    torch.testing.assert_close(found.loss, wanted.loss)
    assert torch.equal(
        model.generate(ids, max_new_tokens=4, do_sample=False), eager.generate(ids, max_new_tokens=4, do_sample=False)
    )


def test_logits_in_training_are_there_for_whoever_looks():
    model, eager = build("llama"), build("llama")
    bind(model, EVERY_KERNEL, registry=REGISTRY)
    ids = tokens()
    found, wanted = model(input_ids=ids, labels=ids).logits, eager(input_ids=ids, labels=ids).logits
    torch.testing.assert_close(torch.argmax(found, dim=-1), wanted.argmax(dim=-1))
    torch.testing.assert_close(found[:, -1], wanted[:, -1])
    torch.testing.assert_close(torch.softmax(found / 2.0, dim=-1), torch.softmax(wanted / 2.0, dim=-1))
    assert found.shape == wanted.shape
    assert isinstance(model(input_ids=ids).logits, torch.Tensor)


@pytest.mark.parametrize("options", [{"num_items_in_batch": 5}, {"return_dict": False}, {"shift_labels": True}])
def test_the_loss_honours_its_options(options):
    model, eager = build("llama"), build("llama")
    bind(model, EVERY_KERNEL, registry=REGISTRY)
    ids = tokens()
    if options.get("shift_labels"):
        options = {"shift_labels": torch.roll(ids, -1, dims=1)}
    found, wanted = (m(input_ids=ids, labels=ids, **options) for m in (model, eager))
    torch.testing.assert_close(found[0], wanted[0])
    assert calls[("cross_entropy_loss", "causal", "one")] == 1


def test_labels_may_be_given_by_position_and_in_a_model_that_failed_before():
    model, eager = build("llama"), build("llama")
    bind(model, EVERY_KERNEL, registry=REGISTRY)
    with pytest.raises(Exception, match="."):
        model(input_ids=tokens() + 1000, labels=tokens())
    model.eval()
    assert isinstance(model(input_ids=tokens()).logits, torch.Tensor)
    model.train()
    position = list(__import__("inspect").signature(eager.forward).parameters).index("labels")
    arguments = [tokens(), *[None] * (position - 1), tokens()]
    torch.testing.assert_close(model(*arguments).loss, eager(*arguments).loss)


@pytest.mark.parametrize(
    "family, setting, options",
    [
        ("gemma3_text", {"final_logit_softcapping": 5.0}, {"softcap": 5.0, "scale": None}),
        ("cohere", {"logit_scale": 0.25}, {"softcap": None, "scale": 0.25}),
        ("granite", {"logits_scaling": 8.0}, {"softcap": None, "scale": 0.125}),
    ],
)
def test_a_softcap_or_scale_between_head_and_loss_reaches_the_kernel(family, setting, options, monkeypatch):
    seen = []
    contract = cross_entropy_loss.CONTRACTS["causal"]

    def kernel(*args, **kwargs):
        seen.append({name: kwargs[name] for name in options})
        return contract.reference(*args, **kwargs)

    monkeypatch.setattr(KernelSpec, "load", lambda spec: kernel)
    model, eager = build(family, **setting), build(family, **setting)
    bind(model, {"preset": "eager", "cross_entropy_loss_implementation": "one"}, registry=REGISTRY)
    (found, gradients), (wanted, wanted_gradients) = step(model), step(eager)
    assert seen == [options]
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(gradients, wanted_gradients, rtol=1e-4, atol=1e-6)


def test_a_clamp_between_head_and_loss_leaves_the_loss_eager():
    model = build("llama")
    head_forward = type(model.lm_head).forward

    class Clamped(type(model)):
        def forward(self, input_ids, labels=None, **kwargs):
            logits = self.lm_head(self.model(input_ids).last_hidden_state).clamp(-1, 1)
            return CausalLMOutput(loss=self.loss_function(logits, labels, self.config.vocab_size), logits=logits)

    model.__class__ = Clamped
    (site,) = [site for site in find_sites(model, REGISTRY) if site.op_name == "cross_entropy_loss"]
    assert site.variant is None
    assert "something between its output projection and its loss needs the logits" in site.evidence
    assert type(model.lm_head).forward is head_forward


def test_verify_runs_the_kernels_on_this_device_first(install, monkeypatch):
    model = build("llama")
    binding = bind(model, EVERY_KERNEL, registry=REGISTRY, verify=True)
    assert "rms_norm/standard:one on cpu in float32" in binding.receipt.verified
    binding.undo()

    from veomni_core.ops import rms_norm

    kernel = "counting__rms_norm__standard__wrong"
    import counting_kernels

    monkeypatch.setattr(counting_kernels, kernel, lambda x, w, eps: -rms_norm.standard(x, w, eps), raising=False)
    config = {"preset": "eager", "rms_norm_implementation": "wrong"}
    with pytest.raises(ConformanceError, match="rms_norm/standard:wrong on cpu in float32 breaks its contract"):
        bind(model, config, registry=counting_registry("wrong", ops=("rms_norm",)), verify=True)
    assert binding_of(model) is None


def test_a_kernel_that_does_not_load_leaves_the_model_as_it_was():
    from veomni_core import KernelSpec
    from veomni_core.discovery import CORE
    from veomni_core.registry import PluginRecord, build_registry

    spec = KernelSpec("broken", "rms_norm", "standard", "a_library_that_is_not_here:kernel")
    registry = build_registry([CORE, PluginRecord("p", "veomni-p", "1", "p", kernels=(spec,))], {})
    model = build("llama")
    with pytest.raises(
        KernelLoadError, match="rms_norm/standard:broken: a_library_that_is_not_here:kernel failed: Modu"
    ):
        bind(model, {"preset": "eager", "rms_norm_implementation": "broken"}, registry=registry)
    assert not [name for m in model.modules() for name in vars(m) if name == "forward" or name.startswith("_veomni")]


def test_per_module_choice():
    model = build("qwen3")
    config = {"preset": "eager", "rms_norm_implementation": {"*.q_norm": "one", "default": "eager"}}
    binding = bind(model, config, registry=REGISTRY)
    step(model)
    assert calls == {("rms_norm", "standard", "one"): 2}
    (op,) = [op for op in binding.receipt.to_dict()["ops"] if op["op"] == "rms_norm"]
    assert (op["bound"], op["found"]) == (2, 9) and len(op["eager"]) == 7


def test_the_receipt_names_what_was_left_eager_and_a_warning_says_so_once(caplog):
    model = build("seed_oss", residual_dropout=0.1)
    config = {"preset": "eager", "swiglu_mlp_implementation": ["one", "eager"], "rms_norm_implementation": "one"}
    with caplog.at_level(logging.WARNING):
        binding = bind(model, config, registry=REGISTRY)
    (op,) = [op for op in binding.receipt.to_dict()["ops"] if op["op"] == "swiglu_mlp"]
    assert op["bound"] == 0 and op["found"] == 2
    assert "no variant fits; the nearest, " in op["eager"][0]["reason"]
    assert caplog.text.count("swiglu_mlp_implementation: 2 of 2 sites stay eager") == 1
    table = binding.receipt.table()
    assert "rms_norm_implementation" in table and "5/5" in table and "0/2" in table


def test_modeling_backend_hf_turns_binding_off():
    model = build("llama")
    config = OpsConfig.from_dict({"preset": "auto"}, REGISTRY, environ={"MODELING_BACKEND": "hf"})
    binding = bind(model, config)
    step(model)
    assert not calls and not any(decision.bound for op in binding.plan.ops for decision in op.sites)


def test_a_plan_made_on_meta_binds_the_real_model():
    with torch.device("meta"):
        skeleton = build("qwen3_moe")
    plan = make_plan(skeleton, OpsConfig.from_dict(EVERY_KERNEL, REGISTRY))
    model, eager = build("qwen3_moe"), build("qwen3_moe")
    bind(model, plan, registry=REGISTRY)
    assert_equal_steps(step(model), step(eager))


def test_what_is_no_model_is_refused():
    with pytest.raises(BindingError, match=r"needs a torch.nn.Module, not a dict"):
        bind({}, EVERY_KERNEL, registry=REGISTRY)
    with pytest.raises(BindingError, match=r"needs a torch.nn.Module, not a dict"):
        find_sites({}, REGISTRY)


def test_a_model_without_sites_binds_to_nothing():
    binding = bind(nn.Linear(2, 2), {"preset": "auto"}, registry=REGISTRY)
    assert all(not op.sites for op in binding.plan.ops)


def test_sequence_classification():
    config = build("llama").config
    config.num_labels = 3
    torch.manual_seed(0)
    model = transformers.LlamaForSequenceClassification(config).train()
    eager = copy.deepcopy(model)
    bind(model, EVERY_KERNEL, registry=REGISTRY)
    losses = [m(input_ids=tokens(), labels=torch.tensor([0, 2])).loss for m in (model, eager)]
    torch.testing.assert_close(*losses)
    assert calls[("cross_entropy_loss", "seq_cls", "one")] == 1


def test_a_language_model_within_a_model_shares_the_outer_one_s_site():
    inner, plain = build("llama"), build("llama")

    class Outer(type(inner)):
        def __init__(self, language_model):
            nn.Module.__init__(self)
            self.language_model, self.config = language_model, language_model.config

        def get_output_embeddings(self):
            return self.language_model.lm_head

        def forward(self, input_ids, labels=None, **kwargs):
            logits = self.language_model(input_ids=input_ids, **kwargs).logits
            return CausalLMOutput(loss=self.loss_function(logits, labels, self.config.vocab_size), logits=logits)

    outer, ids = Outer(inner).train(), tokens()
    assert [site.path for site in find_sites(outer, REGISTRY) if site.op_name == "cross_entropy_loss"] == [""]
    bind(outer, {"preset": "eager", "cross_entropy_loss_implementation": "one"}, registry=REGISTRY)
    found = outer(input_ids=ids, labels=ids)
    torch.testing.assert_close(found.loss, plain(input_ids=ids, labels=ids).loss)
    assert calls[("cross_entropy_loss", "causal", "one")] == 1
    torch.testing.assert_close(found.logits.argmax(-1), plain(input_ids=ids).logits.argmax(-1))


def test_logits_of_a_step_can_be_read_after_undo():
    model, eager, ids = build("llama"), build("llama"), tokens()
    with bind(model, EVERY_KERNEL, registry=REGISTRY):
        output = model(input_ids=ids, labels=ids)
    torch.testing.assert_close(output.logits[:, -1], eager(input_ids=ids).logits[:, -1])
