"""Bound models that run sequence-parallel: copied, changed by other code, and the plan's sites."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from ulysses_models import causal_batch, registry
from ulysses_ranks import check, raises, size

from models import EVERY_KERNEL, build
from veomni_core import bind
from veomni_core.changes.transformation import transformations_of
from veomni_core.errors import BindingError, ConfigError
from veomni_ops.load_balancing_loss import CONTRACTS
from veomni_transformers.sequence import apply_ulysses, model_sites

OPS = {**EVERY_KERNEL, "attn_implementation": "sdpa"}


def halved(model: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 0.5
    return model


@check
def a_deep_copy_runs_its_own_weights_and_is_undone_on_its_own() -> None:
    batch = causal_batch()
    reference, model = build("qwen3_moe"), build("qwen3_moe", attn_implementation="sdpa")
    binding = bind(model, OPS, registry=registry())
    applied = apply_ulysses(model)
    twin = halved(copy.deepcopy(model))
    whole, half = reference(**batch).loss, halved(copy.deepcopy(reference))(**batch).loss
    assert not torch.isclose(whole, half)
    torch.testing.assert_close([twin(**batch).loss, model(**batch).loss], [half, whole])
    own_binding, own = transformations_of(twin)
    assert own.model is twin and own.group is applied.group and own.describe() == applied.describe()
    assert own_binding.receipt == binding.receipt and not own_binding.receipt.changed
    applied.undo()
    binding.undo()
    torch.testing.assert_close([twin(**batch).loss, model(**batch).loss], [half, whole])
    raises(BindingError, "sequence parallelism (Ulysses", own_binding.undo)
    own.undo()
    assert twin(**batch).logits.shape[1] == batch["input_ids"].shape[1]
    own_binding.undo()
    assert [type(module) for module in twin.modules()] == [type(module) for module in reference.modules()]
    torch.testing.assert_close(twin(**batch).loss, half)


@check
def what_other_code_has_overridden_since_is_in_the_receipt() -> None:
    model = build("qwen3_moe", attn_implementation="sdpa")
    binding = bind(model, {**OPS, "cross_entropy_loss_implementation": "eager"}, registry=registry())
    applied = apply_ulysses(model)
    assert not binding.receipt.changed
    model.loss_function = model.loss_function.__class__  # any other
    assert binding.receipt.changed == {"the model": "Qwen3MoeForCausalLM._loss_function was replaced"}
    model.set_attn_implementation("eager")
    (said,) = binding.receipt.changed.values()
    assert "its attention was set to eager" in said and "_loss_function was replaced" in said
    assert applied.changed() == binding.receipt.changed
    assert f"Changed since: the model: {said.split(';')[0]}" in binding.receipt.table()
    applied.undo()
    binding.undo()


@check
def a_bound_model_is_not_searched_again() -> None:
    model = build("qwen3_moe", attn_implementation="sdpa")
    bind(model, OPS, registry=registry())
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(model_sites, "search")
        apply_ulysses(model).undo()
    unbound = build("qwen3_moe", attn_implementation="sdpa")
    wanted = [(each.site.op_name, each.site.path, each.site.variant) for each in model_sites.sites_of(unbound)]
    found = [(each.site.op_name, each.site.path, each.site.variant) for each in model_sites.sites_of(model)]
    on_request = {
        each for each in wanted if each[0] in ("linear", "token_logprobs")
    }  # no field of the plan asks for them
    assert set(found) == set(wanted) - on_request and ("load_balancing_loss", "", "standard") in found


@check
def a_part_of_a_bound_model_runs_alone_and_a_part_that_is_bound_alone_is_refused() -> None:
    batch = {"input_ids": causal_batch()["input_ids"]}
    reference, model, other = (build("llama", attn_implementation="sdpa") for _ in range(3))
    ops = {"preset": "eager", "attn_implementation": "sdpa", "rms_norm_implementation": "one"}
    binding = bind(model, ops, registry=registry())
    with apply_ulysses(model.model):
        found = model.model(**batch).last_hidden_state
        assert found.shape[1] == batch["input_ids"].shape[1] // size()
        raises(BindingError, "on top of this binding", binding.undo)
        raises(BindingError, "already", lambda: apply_ulysses(model))
    torch.testing.assert_close(model.model(**batch).last_hidden_state, reference.model(**batch).last_hidden_state)
    bind(other.model, ops, registry=registry())
    raises(BindingError, "LlamaForCausalLM was not bound itself", lambda: apply_ulysses(other))
    raises(BindingError, "the same model as bind", lambda: apply_ulysses(copy.copy(model)))


@check
def a_load_balancing_loss_that_is_not_the_standard_one_is_refused() -> None:
    from transformers.models.qwen3_moe import modeling_qwen3_moe as modeling

    def doubled(*args: Any) -> Any:
        return 2 * CONTRACTS["standard"].reference(*args)

    model = build("qwen3_moe", attn_implementation="sdpa")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling, "load_balancing_loss_func", doubled)
        raises(ConfigError, "its load-balancing loss is not proven (", lambda: apply_ulysses(model))


@check
def the_attention_that_was_set_after_bind_is_the_one_that_is_named() -> None:
    model = build("llama", attn_implementation="sdpa")
    bind(model, {"preset": "eager"}, registry=registry())
    model.set_attn_implementation("sdpa")
    assert apply_ulysses(model).describe() == f"Ulysses, sp={size()}, over sdpa"


@check
def a_model_compiles_as_one_graph() -> None:
    batch = causal_batch()
    # A layer, since Dynamo traces each one for itself: two take twice as long, and say the same.
    model = build("llama", attn_implementation="sdpa", num_hidden_layers=1)
    apply_ulysses(model)
    wanted = model(**batch).loss  # the first call compares the ranks' batches, which no graph does
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**batch).loss, wanted)
