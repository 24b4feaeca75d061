"""Settings that change after bind, on which a site's proof rests: an error, or the module's own code, as asked."""

from __future__ import annotations

import copy
import functools
import logging

import pytest
import torch
from torch import nn

from counting_kernels import calls, counting_registry
from models import assert_equal_steps, assert_same_bits, build, step, tokens
from plugin_rules import GuardedNorms, registry_with
from veomni_core import bind
from veomni_core.errors import SiteChangedError, UnknownNameError

REGISTRY = counting_registry("one")
X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
NORMS = {"preset": "eager", "attn_implementation": "eager", "rms_norm_implementation": "one"}
GUARDED = registry_with(GuardedNorms)


class Norm(nn.Module):
    """A norm that only the plugin's rule finds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.eps, self.act = 1e-6, nn.Identity()

    def forward(self, x):
        return self.act(self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


def two_norms() -> nn.Module:
    return nn.ModuleDict({"a_norm": Norm(), "b_norm": Norm()})


CHANGES = {
    "a setting": lambda model: setattr(model.a_norm, "eps", 0.5),
    "a child": lambda model: setattr(model.a_norm, "act", nn.ReLU()),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_raises_at_the_write_and_leaves_all_as_it_was(what):
    model = two_norms()
    binding = bind(model, NORMS, registry=GUARDED)
    with pytest.raises(SiteChangedError, match=r"a_norm: (eps|act) was changed after bind.*undo\(\) first and bind ag"):
        CHANGES[what](model)
    assert model.a_norm.eps == 1e-6 and isinstance(model.a_norm.act, nn.Identity) and not binding.receipt.changed
    model.a_norm(X)
    assert calls == {("rms_norm", "standard", "one"): 1}
    binding.undo()
    CHANGES[what](model)


@pytest.mark.parametrize("said", ["in the config", "to bind"])
@pytest.mark.parametrize("what", CHANGES)
def test_a_change_lets_the_module_run_its_own_code_where_that_is_asked(what, said, caplog):
    model, eager = two_norms(), two_norms()
    if said == "in the config":
        binding = bind(model, {**NORMS, "on_change": "eager"}, registry=GUARDED)
    else:
        binding = bind(model, NORMS, registry=GUARDED, on_change="eager")
    with caplog.at_level(logging.WARNING):
        for each in (model, eager):
            CHANGES[what](each)
            CHANGES[what](each)
    assert caplog.text.count("a_norm runs its own code from now on: ") == 1
    assert torch.equal(model.a_norm(X), eager.a_norm(X)) and not calls
    model.b_norm(X)
    assert calls == {("rms_norm", "standard", "one"): 1}
    assert list(binding.receipt.changed) == ["a_norm"]
    assert "Changed since: a_norm: " in binding.receipt.table()
    binding.undo()
    assert type(model.a_norm) is type(model.b_norm) is Norm
    assert torch.equal(model.a_norm(X), eager.a_norm(X))


def test_on_change_is_raise_or_eager():
    with pytest.raises(UnknownNameError, match="on_change: 'warn' is unknown"):
        bind(two_norms(), NORMS, registry=GUARDED, on_change="warn")


def test_a_copy_is_guarded_like_its_original():
    model = two_norms()
    bind(model, NORMS, registry=GUARDED)
    for duplicate in (copy.copy(model.a_norm), copy.deepcopy(model.a_norm), copy.deepcopy(model).a_norm):
        with pytest.raises(SiteChangedError, match="eps was changed"):
            duplicate.eps = 0.5


def test_a_guard_does_not_stand_in_the_way_of_data_parallel_s_replicas():
    model = two_norms()
    bind(model, NORMS, registry=GUARDED)
    replica = model.a_norm._replicate_for_data_parallel()
    replica.act = nn.Identity()
    replica.weight = model.a_norm.weight.detach() * 2
    torch.testing.assert_close(replica(X), 2 * model.a_norm(X))


def test_a_class_that_is_replaced_runs_and_is_reported():
    model = build("llama")
    binding = bind(model, NORMS, registry=REGISTRY)

    class Seven(type(build("llama").model.norm)):
        def forward(self, hidden_states):
            return 7 * super().forward(hidden_states)

    model.model.norm.__class__ = Seven
    assert binding.receipt.changed == {"model.norm": "its class became Seven"}
    binding.undo()
    assert type(model.model.norm) is Seven


MLP, EXPERTS = ("swiglu_mlp", "layers.1.mlp"), ("moe", "layers.1.mlp.experts")
PLACES = [(family, "rms_norm", "norm") for family in ("llama", "gemma3_text", "qwen3_moe", "olmo2", "mistral")]
PLACES += [("llama", *MLP), ("gemma3_text", *MLP), ("olmo2", *MLP), ("mistral", *MLP), ("qwen3_moe", *EXPERTS)]


@pytest.mark.parametrize(("family", "op", "path"), PLACES)
def test_another_module_in_the_place_of_a_bound_one_is_in_the_receipt(family, op, path):
    model, other = build(family), build(family)
    with bind(model, {"preset": "eager", f"{op}_implementation": "one"}, registry=REGISTRY) as binding:
        owner, _, name = path.rpartition(".")
        around, own = model.model.get_submodule(owner), model.model.get_submodule(path)
        setattr(around, name, copy.deepcopy(own))  # which runs the kernel too
        assert not binding.receipt.changed
        setattr(around, name, nn.Sequential(own))  # as an adapter holds what it is put around
        assert not binding.receipt.changed
        setattr(around, name, other.model.get_submodule(path))
        kind = type(other.model.get_submodule(path)).__name__
        assert binding.receipt.changed == {f"model.{path}": f"{kind} was put in its place"}
        kept = copy.deepcopy(own)
        del own  # the bound module is freed
        assert binding.receipt.changed == {f"model.{path}": f"{kind} was put in its place"}
        setattr(around, name, nn.Sequential(copy.deepcopy(kept)))  # a copy within a wrapper
        assert not binding.receipt.changed
        del around._modules[name], kept
        assert len(binding.receipt.changed) == bool(owner)  # of norms others are left
        assert all(f"it was taken out of model.{owner} (" in what for what in binding.receipt.changed.values())


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


def identities(model: nn.Module) -> None:
    for layer in model.layers:
        layer.input_layernorm = layer.post_attention_layernorm = SHARED


SHARED = nn.Identity()
REPLACED = {
    "every norm by one": identities,
    "every layer, in wrappers": lambda model: setattr(
        model, "layers", nn.ModuleList(map(Wrapper, build("llama").model.layers))
    ),
    "one layer, in a wrapper": lambda model: model.layers.__setitem__(1, Wrapper(build("llama").model.layers[1])),
    "in __dict__": lambda model: vars(model).update(norm=nn.Identity()),
    "by a function": lambda model: (
        delattr(model, "norm"),
        setattr(model, "norm", lambda hidden_states: hidden_states),
    ),
}
NORMS_OF = {"one layer, in a wrapper": 2, "in __dict__": 1, "by a function": 1}


@pytest.mark.parametrize("how", REPLACED)
def test_each_bound_module_that_is_gone_has_a_line(how):
    model = build("llama")
    with bind(model, NORMS, registry=REGISTRY) as binding:
        REPLACED[how](model.model)
        assert len(binding.receipt.changed) == NORMS_OF.get(how, 4)
        assert all("norm" in path for path in binding.receipt.changed)
        if how == "every norm by one":
            assert {*binding.receipt.changed.values()} == {"Identity was put in its place"}


def test_layers_that_change_places_or_are_taken_out_are_not_replaced_ones():
    model = build("llama")
    with bind(model, NORMS, registry=REGISTRY) as binding:
        first, second = model.model.layers
        model.model.layers = nn.ModuleList([second, first])
        assert not binding.receipt.changed
        model.model.layers = nn.ModuleList([second])
        assert not binding.receipt.changed


def test_accelerate_s_hooks_over_a_bound_model_keep_its_kernels_until_undo():
    hooks = pytest.importorskip("accelerate.hooks")
    model, eager = build("llama"), build("llama")
    binding = bind(model, NORMS, registry=REGISTRY)
    for each in (model, eager):
        for module in each.modules():
            hooks.add_hook_to_module(module, hooks.AlignDevicesHook(io_same_device=True))
    assert_equal_steps(step(model), step(eager))
    assert calls[("rms_norm", "standard", "one")] == 5
    assert not binding.receipt.changed  # the hooks call the kernels
    model.model.norm._old_forward = eager.model.norm._old_forward
    assert "set by accelerate's AlignDevicesHook" in binding.receipt.changed["model.norm"]
    model.model.norm._old_forward = type(model.model.norm).forward.__get__(model.model.norm)
    binding.undo()
    calls.clear()
    assert_same_bits(step(model), step(eager))
    assert not calls


def closure(model: nn.Module) -> None:
    own = model.forward

    def forward(input_ids=None, labels=None, **kwargs):
        return own(input_ids=input_ids, labels=labels, **kwargs)

    model.forward = forward


def partial(model: nn.Module) -> None:
    model.forward = functools.partial(model.forward)


def dispatched(model: nn.Module) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))


def hooked(model: nn.Module) -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    for module in model.modules():
        hooks.add_hook_to_module(module, hooks.AlignDevicesHook(io_same_device=True))


@pytest.mark.parametrize("wrap", [closure, partial, dispatched, hooked])
def test_rotary_and_load_balancing_sites_under_a_wrapped_forward_are_left_eager_with_the_reason(wrap):
    model, eager = build("qwen3_moe"), build("qwen3_moe")
    wrap(model)
    config = {
        "preset": "eager",
        "rotary_pos_emb_implementation": ["one", "eager"],
        "load_balancing_loss_implementation": ["one", "eager"],
    }
    binding = bind(model, config, registry=REGISTRY)
    reasons = {each["path"]: each["reason"] for op in binding.receipt.to_dict()["ops"] for each in op["eager"]}
    assert "its forward was set on the instance" in reasons[""]
    if wrap is hooked:
        assert "set by accelerate's AlignDevicesHook" in reasons["model.layers.0.self_attn"]
    ids = tokens()
    with torch.no_grad():
        found, wanted = (each(input_ids=ids, labels=ids).loss for each in (model, eager))
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
