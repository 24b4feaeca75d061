"""What training does to a model keeps its kernels: compiling, copying, checkpointing, adapters, saving."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import transformers
from packaging.version import Version

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
from veomni_core import bind, binding_of
from veomni_core.errors import BoundModelPickleError

REGISTRY = counting_registry("one")


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
