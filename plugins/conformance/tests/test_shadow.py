"""Modules' own code beside their kernels while a model trains: what it finds, and that training doesn't notice it."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from counting_kernels import counting_registry
from distributed import run_ranks
from models import EVERY_KERNEL, assert_same_bits, build, step, tokens
from veomni_conformance.given_kernels import definitions
from veomni_core import KernelSpec, Shadow, bind
from veomni_core.discovery.registry import PluginRecord, build_registry
from veomni_core.errors import BindingError, ConformanceError
from veomni_ops import rms_norm, swiglu_mlp

ONE = counting_registry("one")
TROUBLE = 10.0  # above any value that the tiny models norm


class _HalfGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, upstream):
        return upstream / 2


def right(x, weight, eps):
    return rms_norm.standard(x, weight, eps)


def wrong_values(x, weight, eps):
    return rms_norm.standard(x, weight, eps) * 1.01


def wrong_gradient(x, weight, eps):
    return rms_norm.standard(_HalfGradient.apply(x), weight, eps)


def wrong_where_values_are_large(x, weight, eps):
    return rms_norm.standard(x, weight, eps) * (1.01 if x.abs().max() > TROUBLE else 1.0)


def wrong_swiglu(gate, up):
    return swiglu_mlp.standard(gate, up) + 1e-2


def registry_of(*kernels, op="rms_norm"):
    specs = tuple(KernelSpec(each.__name__, op, "standard", f"{__name__}:{each.__name__}") for each in kernels)
    return build_registry(
        [*definitions(), PluginRecord("planted", "veomni-planted", "1.0", __name__, kernels=specs)], {}
    )


def bound_with(model, kernel, path="*", op="rms_norm"):
    """``model`` with ``kernel`` at ``path`` and the right one elsewhere."""
    registry = registry_of(kernel, right) if op == "rms_norm" else registry_of(kernel, op=op)
    others = "right" if op == "rms_norm" else "eager"
    bind(
        model,
        {"preset": "eager", f"{op}_implementation": {path: kernel.__name__, "default": others}},
        registry=registry,
    )
    return registry


@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["kept", "recomputed", "reentrant"])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_right_kernels_agree_and_the_training_does_not_notice(family, autocast, checkpointing):
    model = build(family, attention_dropout=0.1)
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        model.enable_input_require_grads()
    binding = bind(model, {**EVERY_KERNEL, "attn_implementation": "sdpa"}, autocast=autocast, device="cpu")
    sites = {each.site.path for op in binding.plan.ops for each in op.sites if each.bound}
    context = torch.autocast("cpu", autocast) if autocast else nullcontext()
    with context:
        wanted = step(model)
        after = torch.rand(3)
        with Shadow(model) as shadow:
            found = step(model)
            assert torch.equal(torch.rand(3), after)
        assert_same_bits(found, wanted)
    assert (shadow.breaches, shadow.not_compared) == ({}, {})
    assert {*shadow.compared} == sites
    shadow.raise_if_breached()
    assert_same_bits(step(model), step(model))


@pytest.mark.parametrize("kernel", [wrong_values, wrong_gradient])
def test_the_one_wrong_site_of_a_model_is_named(kernel):
    path = "model.layers.1.input_layernorm"
    model = build("qwen3_moe")
    with Shadow(model, bound_with(model, kernel, path)) as shadow:
        step(model)
    assert [*shadow.breaches] == [path]
    with pytest.raises(ConformanceError, match=rf"step 1: .*\n  {path}: rms_norm/standard:{kernel.__name__}: "):
        shadow.raise_if_breached("step 1")


def test_a_kernel_of_a_multilayer_perceptron_that_is_wrong_is_named():
    model = build("llama")
    with Shadow(model, bound_with(model, wrong_swiglu, "*.layers.0.*", op="swiglu_mlp")) as shadow:
        step(model)
    assert [*shadow.breaches] == ["model.layers.0.mlp"]


@pytest.mark.parametrize("op", ["cross_entropy_loss", "attention"])
def test_a_wrong_kernel_of_the_whole_model_is_named(op, monkeypatch):
    from veomni_ops import attention, cross_entropy_loss

    module, name = {"cross_entropy_loss": (cross_entropy_loss, "causal"), "attention": (attention, "standard")}[op]
    own = getattr(module, name)
    if op == "attention":
        monkeypatch.setattr(module, "planted", lambda *a, **k: (own(*a, **k)[0] * 1.5, None), raising=False)
    else:
        monkeypatch.setattr(module, "planted", lambda *a, **k: own(*a, **k) * 1.01, raising=False)
    spec = KernelSpec(
        "planted", op, name, f"{module.__name__}:planted", features=("sdpa_mask",) if op == "attention" else ()
    )
    registry = build_registry(
        [*definitions(), PluginRecord("planted", "veomni-planted", "1.0", __name__, kernels=(spec,))], {}
    )
    model = build("llama")
    field = registry.op(op).config_field
    bind(model, {"preset": "eager", field: "planted"}, registry=registry)
    with Shadow(model, registry) as shadow:
        step(model)
    assert [*shadow.breaches] == [""]
    with pytest.raises(ConformanceError, match="the model: "):
        shadow.raise_if_breached()


def test_what_only_the_trainings_own_data_shows_is_found():
    model = build("llama")
    registry = bound_with(model, wrong_where_values_are_large)
    with Shadow(model, registry) as shadow:
        step(model)
        assert not shadow.breaches
        with torch.no_grad():
            model.model.embed_tokens.weight[7] *= 1000
        step(model, torch.full((1, 5), 7))
    assert "model.layers.0.input_layernorm" in shadow.breaches


def test_validation_is_not_compared_and_after_the_end_nothing_is():
    model = build("llama")
    registry = bound_with(model, wrong_values)
    shadow = Shadow(model, registry)
    model.eval()
    step(model)
    assert not shadow.breaches and not shadow.compared
    model.train()
    shadow.end()
    step(model)
    assert not shadow.breaches
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())


def test_a_cache_is_left_out_where_it_is_empty_and_named_where_it_is_not():
    model = build("llama")
    with Shadow(model, bound_with(model, right)) as shadow:
        ids = tokens()
        first = model(ids, use_cache=True)
        assert not shadow.not_compared
        assert first.past_key_values.get_seq_length() == ids.shape[1]


def test_under_autocast_of_accelerate_the_own_code_runs_under_it_too(bf16_accelerator):
    model = build("llama")
    bind(model, {**EVERY_KERNEL, "attn_implementation": "sdpa"}, autocast="bfloat16", device="cpu")
    prepared = bf16_accelerator.prepare_model(model)
    wanted = step(prepared)
    with Shadow(model) as shadow:
        for _ in range(3):
            assert_same_bits(step(prepared), wanted)
    assert (shadow.breaches, shadow.not_compared) == ({}, {})
    assert shadow.compared[""] == 3
    assert_same_bits(step(prepared), wanted)


def test_a_site_that_other_code_took_over_is_not_called_equal():
    model = build("llama")
    with Shadow(model, bound_with(model, wrong_values, "model.norm")) as shadow:
        model.model.norm.forward = lambda hidden_states: hidden_states
        step(model)
    assert [*shadow.not_compared] == ["model.norm"]
    assert "does not run what was bound: it was given a forward of its own" in shadow.not_compared["model.norm"]
    assert "model.norm" not in shadow.compared


@pytest.mark.parametrize("wrapped", [False, True], ids=["bare", "wrapped by accelerate"])
@pytest.mark.parametrize("wrong", ["cross_entropy_loss", "load_balancing_loss"])
def test_of_two_sites_in_one_forward_the_wrong_one_is_found(wrong, wrapped, monkeypatch, bf16_accelerator):
    from veomni_ops import cross_entropy_loss, load_balancing_loss

    specs = []
    for module, name in ((cross_entropy_loss, "causal"), (load_balancing_loss, "standard")):
        op = module.__name__.rpartition(".")[2]
        factor, own = (1.05 if op == wrong else 1.0), getattr(module, name)
        monkeypatch.setattr(module, "planted", lambda *a, f=factor, o=own, **k: o(*a, **k) * f, raising=False)
        specs.append(KernelSpec("planted", op, name, f"{module.__name__}:planted"))
    record = PluginRecord("planted", "veomni-planted", "1.0", __name__, kernels=tuple(specs))
    registry = build_registry([*definitions(), record], {})
    model = build("qwen3_moe")
    fields = {registry.op(spec.op_name).config_field: "planted" for spec in specs}
    bind(model, {"preset": "eager", **fields}, registry=registry)
    running = bf16_accelerator.prepare_model(model) if wrapped else model
    with Shadow(model, registry) as shadow:
        step(running)
    assert [*shadow.breaches] == [""]


def test_models_without_kernels_are_refused():
    model = build("llama")
    with pytest.raises(BindingError, match="is not bound"):
        Shadow(model)
    bind(model, {"preset": "eager"})
    with pytest.raises(BindingError, match="every site is eager"):
        Shadow(model)


def test_another_transformation_on_top_is_refused():
    from veomni_core.changes.transformation import Transformation

    class OnTop(Transformation):
        name = "sequence parallelism"

        def describe(self):
            return "2 ranks"

    model = build("llama")
    bind(model, EVERY_KERNEL, registry=ONE)
    with OnTop(model) as state:
        state.apply([])
        with pytest.raises(BindingError, match=r"sequence parallelism \(2 ranks\) was applied on top"):
            Shadow(model, ONE)


@pytest.mark.thorough
def test_one_ranks_breach_ends_all_ranks_with_the_same_words():
    body = """
        import sys
        sys.path.insert(0, {folder!r})
        from torch.nn.parallel import DistributedDataParallel
        from models import build, tokens
        from test_shadow import bound_with, right, wrong_where_values_are_large
        from veomni_core import Shadow
        from veomni_core.errors import ConformanceError

        rank, model = torch.distributed.get_rank(), build("qwen3_moe")
        with torch.no_grad():
            model.model.embed_tokens.weight[7] *= 1000
        registry = bound_with(model, wrong_where_values_are_large, "model.layers.0.input_layernorm")
        parallel = DistributedDataParallel(model, find_unused_parameters=True)
        with Shadow(model, registry) as shadow:
            for step in range(3):
                ids = torch.full((2, 9), 7) if (rank, step) == (1, 1) else torch.randint(8, 60, (2, 9))
                parallel(input_ids=ids, labels=ids).loss.backward()
                try:
                    shadow.raise_if_breached(f"step {{step}}")
                except ConformanceError as error:
                    print(step, error)
                    break
    """
    import os

    first, second = run_ranks(body.format(folder=os.path.dirname(__file__)))
    assert first == second
    assert first.startswith("1 step 1: ")
    assert "rank 1: model.layers.0.input_layernorm: rms_norm/standard:wrong_where_values_are_large: the result" in first
