"""What training does to a model keeps its kernels: compiling, copying, checkpointing, adapters, saving."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers
from packaging.version import Version
from torch import nn

from counting_kernels import calls, counting_registry
from models import (
    EVERY_KERNEL,
    FAMILIES,
    FAMILIES_WITH_EXPERTS,
    assert_equal_steps,
    assert_same_bits,
    build,
    step,
    tokens,
)
from veomni_core import bind, binding_of, find_sites
from veomni_core.binding.application import put_into
from veomni_core.errors import BindingError, BoundModelPickleError

REGISTRY = counting_registry("one")


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("family", FAMILIES)
def test_compile_fullgraph(family):
    if family in FAMILIES_WITH_EXPERTS and Version(transformers.__version__) < Version("5.20"):
        pytest.skip("before 5.20 transformers' own experts don't compile on a CPU, bound or not")
    torch._dynamo.reset()
    model, eager, ids = build(family, experts_implementation="eager"), build(family), tokens()
    bind(model, {**EVERY_KERNEL, "moe_implementation": "eager"}, registry=REGISTRY)
    if family in FAMILIES_WITH_EXPERTS:
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


@pytest.mark.thorough
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


def test_a_copied_part_binds_and_unbinds_on_its_own():
    model, eager = build("llama"), build("llama")
    binding = bind(model, EVERY_KERNEL, registry=REGISTRY)
    part = copy.deepcopy(model.model)
    assert binding_of(part) is binding_of(model.model) is binding
    with pytest.raises(BindingError, match=r"bound already \(model.layers.0.*undo\(\) first"):
        bind(model.model, EVERY_KERNEL, registry=REGISTRY)
    with pytest.raises(BindingError, match=r"this model is bound: binding_of\(model\)"):
        find_sites(part, REGISTRY)
    with bind(part, EVERY_KERNEL, registry=REGISTRY) as own:
        calls.clear()
        part(input_ids=tokens())
        assert calls[("rms_norm", "standard", "one")] == 5
        assert binding_of(part) is own and binding.active
    calls.clear()
    assert [type(module) for module in part.modules()] == [type(module) for module in eager.model.modules()]
    assert [list(vars(module)) for module in part.modules()] == [list(vars(module)) for module in eager.model.modules()]
    torch.testing.assert_close(part(input_ids=tokens())[0], eager.model(input_ids=tokens())[0])
    assert not calls
    step(model)
    assert calls[("rms_norm", "standard", "one")] == 5


def test_of_binds_at_the_same_time_one_succeeds(monkeypatch):
    """Another thread binds the model, and a part of it, while the first bind has planned and not changed anything."""
    model, eager, refused = build("llama"), build("llama"), []

    def bind_meanwhile(*arguments):
        monkeypatch.undo()
        with ThreadPoolExecutor(1) as others:
            again = [others.submit(bind, each, EVERY_KERNEL, registry=REGISTRY) for each in (model, model.model)]
        refused.extend(each.exception() for each in again)
        return put_into(*arguments)

    monkeypatch.setattr("veomni_core.binding.bind.put_into", bind_meanwhile)
    binding = bind(model, EVERY_KERNEL, registry=REGISTRY)
    assert [type(each) for each in refused] == [BindingError] * 2
    assert all("another bind of this model is running" in str(each) for each in refused)
    assert_equal_steps(step(model), step(eager))
    binding.undo()
    assert_same_bits(step(model), step(eager))
    bind(model, EVERY_KERNEL, registry=REGISTRY).undo()


def test_a_shallow_copy_is_bound_with_its_original():
    model = build("llama")
    binding = bind(model, EVERY_KERNEL, registry=REGISTRY)
    duplicate = copy.copy(model)
    assert binding_of(duplicate) is binding
    with pytest.raises(BindingError, match="bound already"):
        bind(duplicate, EVERY_KERNEL, registry=REGISTRY)
    duplicate._modules = {**model._modules, "lm_head": nn.Linear(32, 64, bias=False)}
    eager = build("llama")
    eager.lm_head.load_state_dict(duplicate.lm_head.state_dict())
    assert_equal_steps(step(duplicate), step(eager))
    binding.undo()
    calls.clear()
    assert_same_bits(step(duplicate), step(eager))
    assert not calls


def replicas(model):
    """What nn.DataParallel makes of a model on each device; here every parameter is halved instead of moved."""
    modules = list(model.modules())
    made = {module: module._replicate_for_data_parallel() for module in modules}
    for module, replica in made.items():
        for name, child in module._modules.items():
            setattr(replica, name, made[child])
        for name, parameter in module._parameters.items():
            setattr(replica, name, None if parameter is None else parameter.detach() * 0.5)
    return made[model]


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_data_parallel_replica_runs_its_own_weights(family):
    model, eager, ids = build(family), build(family), tokens()
    bind(model, EVERY_KERNEL, registry=REGISTRY)
    found, wanted = (replicas(each)(input_ids=ids, labels=ids).loss for each in (model, eager))
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    assert calls[("rms_norm", "standard", "one")] > 0


@pytest.mark.parametrize("when", ["bound", "undone", "held by its binding"])
def test_del_frees_a_model_at_once(when):
    model = build("llama", attn_implementation="eager")
    binding = bind(model, EVERY_KERNEL, registry=REGISTRY)
    if when == "undone":
        binding.undo()
    if when != "held by its binding":
        del binding
    gone = weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()
    if when == "held by its binding":
        assert not binding.active and binding.receipt.changed == {}
        with pytest.raises(BindingError, match="the model of this binding was freed"):
            _ = binding.model
        with pytest.raises(BindingError, match="not in force"):
            binding.undo()


ADAPTERS = {
    "LoRA with a norm to save": ("LoraConfig", {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["norm"]}),
    "LoRA with the head to save": (
        "LoraConfig",
        {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    ),
    "norm tuning": ("LNTuningConfig", {"target_modules": ["norm", "input_layernorm"]}),
}


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_undo_reaches_the_copies_that_peft_makes(adapter):
    peft = pytest.importorskip("peft")
    kind, settings = ADAPTERS[adapter]
    model, eager = build("llama"), build("llama")
    binding = bind(model, EVERY_KERNEL, registry=REGISTRY)
    both = []
    for each in (model, eager):
        torch.manual_seed(5)
        both.append(peft.get_peft_model(each, getattr(peft, kind)(task_type="CAUSAL_LM", **settings)))
        for parameter in both[-1].parameters():
            if parameter.requires_grad:
                parameter.data += 0.1 * torch.randn_like(parameter)
    wrapped, wanted = both
    assert_equal_steps(step(wrapped), step(wanted))
    assert calls[("rms_norm", "standard", "one")] > 0
    binding.undo()
    calls.clear()
    assert_same_bits(step(wrapped), step(wanted))
    assert not calls
    assert _why_not_pickled(wrapped) == _why_not_pickled(wanted)


@pytest.mark.thorough
def test_regional_compilation_compiles_one_layer_for_all():
    torch._dynamo.reset()
    model, eager = build("llama", num_hidden_layers=4), build("llama", num_hidden_layers=4)
    bind(model, EVERY_KERNEL, registry=REGISTRY)
    torch._dynamo.utils.counters.clear()
    for layer in model.model.layers:
        layer.compile(backend="eager", fullgraph=True)
    assert_equal_steps(step(model), step(eager))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def _why_not_pickled(model):
    """Empty where it can be pickled. With the package `kernels`, the attention of transformers 5.17 can't be."""
    try:
        pickle.loads(pickle.dumps(model))
    except (AttributeError, pickle.PicklingError) as error:
        return str(error)
    return ""


def test_pickling_says_why_not():
    model = build("llama")
    binding = bind(model, EVERY_KERNEL, registry=REGISTRY)
    for part in (model, model.model.layers[0], model.model.norm, binding):
        with pytest.raises(BoundModelPickleError, match=r"kernels would silently be lost. Save model.state_dict\(\)"):
            pickle.dumps(part)
    with pytest.raises(BoundModelPickleError):
        torch.save(model, io.BytesIO())
    binding.undo()
    assert _why_not_pickled(model) == _why_not_pickled(build("llama"))


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
