"""A second model of a type is not proven again, and whatever could change an answer in between is seen."""

from __future__ import annotations

import functools
import gc
import itertools
import sys
import threading
import types
import weakref

import pytest
import torch
from torch import nn
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, activations, masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.qwen3_moe import modeling_qwen3_moe

from delta_rule_models import family
from models import build
from veomni_core import SiteRule, bind, find_sites, make_plan
from veomni_core.discovery.discover import discover
from veomni_core.errors import SpecError
from veomni_core.sites.find import locator_of
from veomni_core.sites.site import Site
from veomni_ops import rms_norm
from veomni_transformers.memory import proof_memory
from veomni_transformers.memory.proof_memory import Recollection, forget_proofs
from veomni_transformers.norms import proof as norm_proof

AUTO = {"preset": "auto"}


@pytest.fixture(autouse=True)
def _without_former_proofs(monkeypatch):
    """The models here have few modules, and are remembered all the same."""
    monkeypatch.setattr(proof_memory, "FEWEST_MODULES", 0)
    forget_proofs()
    yield
    forget_proofs()


def is_known(model: nn.Module, registry=None) -> bool:
    """Whether a search of ``model`` would prove nothing."""
    rules = (registry or discover()).site_rules
    return len(Recollection(model, {rule: locator_of(rule) for rule in rules})._known) == len(rules)


def qwen(**overrides):
    return build("qwen3_moe", **overrides)


def with_a_vision_tower():
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    text = {**small, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64, "sliding_window": 4}
    vision = {**small, "image_size": 16, "patch_size": 8}
    return Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4))


MODELS = {
    "llama": lambda: build("llama"),
    "qwen3_moe": qwen,
    "gemma3_text": lambda: build("gemma3_text"),
    "deepseek_v3": lambda: build("deepseek_v3"),
    "qwen3_next": lambda: family("qwen3_next"),
    "gemma3": with_a_vision_tower,
}


@pytest.mark.thorough
@pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in MODELS.items()])
def test_the_second_model_has_the_plan_of_the_first(make):
    without = make_plan(make(), AUTO)
    assert is_known(make())
    remembered = make_plan(make(), AUTO)
    assert remembered == without and remembered.sha256 == without.sha256
    forget_proofs()
    assert make_plan(make(), AUTO) == without


def test_a_known_model_runs_no_proof(monkeypatch):
    count, prove = itertools.count(), norm_proof.prove_norm
    monkeypatch.setattr(norm_proof, "prove_norm", counted := _counted(count, prove))
    monkeypatch.setattr("veomni_transformers.norms.rms_norm.prove_norm", counted)
    first = find_sites(build("llama"))
    proofs = next(count)
    assert proofs
    assert find_sites(build("llama")) == first
    assert next(count) == proofs + 1


def _counted(count, prove):
    def counted(*args, **kwargs):
        next(count)
        return prove(*args, **kwargs)

    return counted


@pytest.mark.thorough
def test_a_second_model_is_known_while_the_first_is_bound_and_after_a_step():
    first = qwen()
    binding = bind(first, AUTO)
    ids = torch.arange(3, 12)[None]
    first(input_ids=ids, labels=ids).loss.backward()
    assert is_known(qwen())
    binding.undo()
    assert is_known(qwen())


def test_what_a_caller_does_to_the_sites_stays_with_the_caller():
    for _ in range(2):
        site = next(site for site in find_sites(build("llama")) if site.op_name == "rms_norm")
        assert site.detail["eps"] == 1e-6
        site.detail["eps"] = 1.0


def other(*args, **kwargs):
    return args[0]


def _set(owner, name, value):
    return lambda patch: patch.setattr(owner, name, value)


def _item(mapping, name, value=other):
    return lambda patch: patch.setitem(mapping, name, value)


def _code(function, code=other.__code__):
    return _set(function, "__code__", code)


def wrapped_forward():
    """A forward that closes over a number."""
    forward, factor = modeling_qwen3_moe.Qwen3MoeRMSNorm.forward, 1.0

    def scaled(self, hidden_states):
        return forward(self, hidden_states) * factor

    return scaled


CODE = {
    "a forward": _set(modeling_qwen3_moe.Qwen3MoeRMSNorm, "forward", other),
    "a forward of torch": _set(nn.Linear, "forward", other),
    "a further method": lambda patch: patch.setattr(
        modeling_qwen3_moe.Qwen3MoeRMSNorm, "__call__", other, raising=False
    ),
    "a global function": _set(modeling_qwen3_moe, "apply_rotary_pos_emb", other),
    "a function's code": _code(modeling_qwen3_moe.rotate_half),
    "a default argument": _set(modeling_qwen3_moe.apply_rotary_pos_emb, "__defaults__", (2,)),
    "a keyword's default": _set(modeling_qwen3_moe.rotate_half, "__kwdefaults__", {"dim": 1}),
    "an activation": _item(activations.ACT2FN, "silu", nn.GELU),
    "a class of an activation": _set(activations.SiLUActivation, "forward", other),
    "an attention function": _item(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa"),
    "a registered attention function": _item(ALL_ATTENTION_FUNCTIONS._global_mapping, "mine"),
    "a mask function": _item(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "sdpa"),
    "a function of masks": _set(masking_utils, "causal_mask_function", other),
    "an initialization of rotary embeddings": _item(ROPE_INIT_FUNCTIONS, "linear"),
    "torch's function": _set(torch.nn.functional, "silu", other),
    "torch's operator": _set(torch, "matmul", other),
    "a flag of the class": _set(modeling_qwen3_moe.Qwen3MoePreTrainedModel, "_supports_sdpa", False),
    "a module in sys.modules": lambda patch: patch.setitem(
        sys.modules, masking_utils.__name__, types.ModuleType("mine")
    ),
    "a prover": _set(norm_proof, "prove_norm", other),
    "a contract": _item(rms_norm.CONTRACTS, "mine"),
    "the environment": lambda patch: patch.setenv("TRANSFORMERS_SOMETHING", "1"),
}


@pytest.mark.thorough
def test_a_change_of_code_is_seen(monkeypatch):
    find_sites(qwen())
    [(key, entry)] = proof_memory._remembered_sites.items()
    unseen = []
    for name, change in CODE.items():
        proof_memory._remembered_sites[key] = entry  # it is dropped where a change is seen
        assert is_known(qwen()), name
        model = qwen()  # made before the change, as its constructor may not run after it
        with monkeypatch.context() as patch:
            change(patch)
            unseen += [name] if is_known(model) else []
    assert not unseen
    proof_memory._remembered_sites[key] = entry
    assert is_known(qwen())


def test_a_method_that_a_forward_calls_is_seen(monkeypatch):
    find_sites(build("gemma3_text"))
    assert is_known(build("gemma3_text"))
    monkeypatch.setattr(modeling_gemma3.Gemma3RMSNorm, "_norm", other)
    assert not is_known(build("gemma3_text"))


@pytest.mark.thorough
def test_a_closure_is_seen(monkeypatch):
    monkeypatch.setattr(modeling_qwen3_moe.Qwen3MoeRMSNorm, "forward", forward := wrapped_forward())
    find_sites(qwen())
    assert is_known(qwen())
    cell = dict(zip(forward.__code__.co_freevars, forward.__closure__, strict=True))["factor"]
    cell.cell_contents = 2.0
    assert not is_known(qwen())


def norms_in(model):
    return model.model.layers[1].input_layernorm


def set_forward(model):
    norm = norms_in(model)
    norm.forward = types.MethodType(type(norm).forward, norm)


def hooked(model):
    norms_in(model).register_forward_hook(lambda module, args, output: output)


STATES = {
    "an attribute of one layer": lambda model: setattr(norms_in(model), "variance_epsilon", 1e-3),
    "an integer that was a float": lambda model: setattr(norms_in(model), "variance_epsilon", 1),
    "an added attribute": lambda model: setattr(norms_in(model), "scale", 2.0),
    "an added tensor": lambda model: setattr(norms_in(model), "scale", torch.ones(2)),
    "a set forward": set_forward,
    "a hook": hooked,
    "a hook of parameters": lambda model: norms_in(model).weight.register_hook(lambda gradient: gradient),
    "a parameter's dtype": lambda model: norms_in(model).bfloat16(),
    "a parameter's shape": lambda model: setattr(norms_in(model), "weight", nn.Parameter(torch.ones(1))),
    "a frozen parameter": lambda model: norms_in(model).weight.requires_grad_(False),
    "a tied parameter": lambda model: setattr(norms_in(model), "weight", model.model.norm.weight),
    "a tied head": lambda model: setattr(model.lm_head, "weight", model.model.embed_tokens.weight),
    "a shared module": lambda model: setattr(model.model.layers[1], "input_layernorm", model.model.norm),
    "a removed child": lambda model: delattr(model.model.layers[1], "input_layernorm"),
    "a buffer's values": lambda model: model.model.rotary_emb.inv_freq.mul_(2),
    "a buffer that is not saved": lambda model: norms_in(model).register_buffer("x", torch.ones(1), persistent=False),
    "another class": lambda model: setattr(norms_in(model), "__class__", type("Other", (type(norms_in(model)),), {})),
    "evaluation": lambda model: norms_in(model).eval(),
    "a config's value": lambda model: setattr(model.config, "rms_norm_eps", 1e-3),
    "a config of one layer's own": lambda model: setattr(
        model.model.layers[1].self_attn, "config", type(model.config)(**model.config.to_dict())
    ),
    "an attention implementation": lambda model: setattr(model.config, "_attn_implementation", "eager"),
    "an object of unknown state": lambda model: setattr(norms_in(model), "lock", threading.Lock()),
}


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("change", [pytest.param(change, id=name) for name, change in STATES.items()])
def test_a_change_of_the_model_is_seen(change, known):
    model = qwen()
    assert is_known(model)
    change(model)
    assert not is_known(model)


@pytest.fixture
def known(_without_former_proofs):
    """A search of Qwen3-MoE, run once for all tests."""
    proof_memory._remembered_sites.update(_searched())


@functools.cache
def _searched():
    find_sites(qwen())
    return dict(proof_memory._remembered_sites)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "settings",
    [
        {"rms_norm_eps": 1e-3},
        {"hidden_act": "gelu"},
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
        {"tie_word_embeddings": True},
        {"num_hidden_layers": 3},
        {"dtype": torch.bfloat16},
    ],
    ids=str,
)
def test_another_config_is_seen(settings, known):
    assert is_known(qwen())
    assert not is_known(qwen(**settings))


@pytest.mark.thorough
def test_settings_of_the_process_that_reach_into_proofs_are_seen(known):
    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    model = qwen()
    with Mode():
        assert not is_known(model)
    hook = nn.modules.module.register_module_forward_hook(lambda module, args, output: output)
    assert not is_known(model)
    hook.remove()
    with torch.no_grad():
        assert not is_known(model)
    torch.use_deterministic_algorithms(True)
    try:
        assert not is_known(model)
    finally:
        torch.use_deterministic_algorithms(False)
    assert is_known(model)


PLUGIN = """
    from veomni_core import SiteRule, hookimpl
    from veomni_core.sites.site import Site

    VEOMNI_PLUGIN_API_VERSION = 1
    ENDING, PROBLEMS = "norm", []

    class Locator:
        def find(self, model, rule):
            for problem in PROBLEMS:
                raise problem
            for path, module in model.named_modules():
                if path.endswith(ENDING):
                    yield Site("rms_norm", path, rule, "standard", "the plugin says so", detail=self.detail(module))

        def detail(self, module):
            return {}

        def install(self, model, site, kernel, spec):
            yield from ()

    @hookimpl
    def veomni_sites():
        return [SiteRule("acme rule", "{module}:Locator")]
"""


@pytest.fixture
def plugin(install):
    name = install("acme", PLUGIN)
    registry = discover({})
    registry_rule = next(rule for rule in registry.site_rules if rule.name == "acme rule")
    locator_of(registry_rule)  # imports it
    return sys.modules[name], registry


def paths_of(sites):
    return [site.path for site in sites if site.rule == "acme rule"]


@pytest.mark.thorough
def test_a_plugin_s_rule_is_remembered_until_its_module_changes(plugin, monkeypatch):
    module, registry = plugin
    found = find_sites(build("llama"), registry)
    assert is_known(build("llama"), registry)
    assert find_sites(build("llama"), registry) == found
    monkeypatch.setattr(module, "ENDING", "input_layernorm")
    assert not is_known(build("llama"), registry)
    assert paths_of(find_sites(build("llama"), registry)) != paths_of(found)


@pytest.mark.thorough
def test_a_rule_that_fails_is_not_remembered(plugin):
    module, registry = plugin
    module.PROBLEMS.append(SpecError("not today"))
    assert not paths_of(find_sites(build("llama"), registry))
    [entry] = proof_memory._remembered_sites.values()
    assert {rule.name for rule in entry.sites} == {r.name for r in registry.site_rules} - {"acme rule"}
    module.PROBLEMS.clear()
    assert paths_of(find_sites(build("llama"), registry))
    assert is_known(build("llama"), registry)


@pytest.mark.thorough
@pytest.mark.parametrize("kept", ["an object in its sites", "state in its locator"])
def test_a_rule_that_keeps_an_object_is_not_remembered(kept, plugin, monkeypatch):
    module, registry = plugin
    if kept == "an object in its sites":
        monkeypatch.setattr(module.Locator, "detail", lambda self, norm: {"module": norm})
    else:
        monkeypatch.setattr(
            module.Locator, "__init__", lambda self: vars(self).update(lock=threading.Lock()), raising=False
        )
    for _ in range(2):
        assert paths_of(find_sites(build("llama"), registry))
        [entry] = proof_memory._remembered_sites.values()
        assert {rule.name for rule in entry.sites} == {r.name for r in registry.site_rules} - {"acme rule"}


@pytest.mark.thorough
def test_code_that_changes_during_a_search_is_not_remembered(plugin):
    module, registry = plugin
    module.Locator.detail = lambda self, norm: module.PROBLEMS.append(norm) or {}
    find_sites(build("llama"), registry)
    assert not proof_memory._remembered_sites


def closing_over(module):
    return lambda x: (x, module)


def test_models_are_not_kept_alive():
    model = qwen()
    norm = norms_in(model)
    norm.helper = closing_over(norm)
    find_sites(model)
    assert is_known(model)
    gone = [weakref.ref(each) for each in (model, model.config, norm.weight, norm.helper)]
    del model, norm
    gc.collect()
    assert [each() for each in gone] == [None] * len(gone)


@pytest.mark.thorough
def test_only_the_latest_models_are_remembered(monkeypatch):
    monkeypatch.setattr(proof_memory, "_MOST_MODELS", 2)
    rule = SiteRule("rule", "delta_rule_models:family")
    for width in (1, 2, 3):
        recollection = Recollection(nn.Linear(width, 1), {rule: object.__new__(nn.Identity)})
        list(recollection.sites(rule, lambda: [Site("rms_norm", "", "rule", None, "")]))
        recollection.keep()
    assert len(proof_memory._remembered_sites) == 2


@pytest.mark.thorough
def test_threads_may_search_at_once():
    wanted = find_sites(build("llama"))
    forget_proofs()
    found = []
    threads = [threading.Thread(target=lambda: found.append(find_sites(build("llama")))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [wanted] * 3


@pytest.mark.thorough
def test_a_model_of_few_modules_is_proven_anew(monkeypatch):
    monkeypatch.setattr(proof_memory, "FEWEST_MODULES", 200)
    for layers, known in ((2, False), (18, True)):
        find_sites(build("llama", num_hidden_layers=layers))
        assert is_known(build("llama", num_hidden_layers=layers)) is known
