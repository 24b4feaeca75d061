"""What is undone without a trace, and what is refused."""

from __future__ import annotations

import gc
import pickle

import torch
from transformers import AutoModelForSequenceClassification, LlamaConfig
from ulysses_models import LENGTH, causal_batch, packed_positions, registry
from ulysses_ranks import check, raises, rank, size

from models import EVERY_KERNEL, build, tokens
from veomni_core import bind, binding_of
from veomni_core.changes.bound_subclass import NO_PICKLE
from veomni_core.errors import BindingError, BoundModelPickleError, ConfigError, HostError
from veomni_transformers.sequence import apply_ulysses


@check
def undo_restores_the_model_and_transformers() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    gc.collect()  # models that earlier checks left bound give their names back now, and not halfway through this one
    interfaces = (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)
    unbound = [set(interface.valid_keys()) for interface in interfaces]
    model = build("qwen3_moe", attn_implementation="sdpa")
    binding = bind(model, {**EVERY_KERNEL, "attn_implementation": "sdpa"}, registry=registry())
    names = [set(interface.valid_keys()) for interface in interfaces]
    before = {path: dict(vars(module)) for path, module in model.named_modules()}
    receipt = binding.receipt
    applied = apply_ulysses(model)
    assert binding_of(model) is binding and binding.plan is receipt.plan
    description = f"Ulysses, sp={size()}, over sdpa"
    assert f"In force: sequence parallelism: {description}" in binding.receipt.table()
    assert [each["name"] for each in binding.receipt.to_dict()["transformations"]] == [binding.name, applied.name]
    assert binding.receipt.transformations[1] == ("sequence parallelism", description)
    assert not binding.receipt.changed
    raises(BindingError, "already", lambda: apply_ulysses(model))
    raises(BindingError, f"{description}) was applied on top of this binding: undo() that first", binding.undo)
    for each in (model, binding, applied):
        raises(BoundModelPickleError, NO_PICKLE, lambda each=each: pickle.dumps(each))
    applied.undo()
    assert {path: dict(vars(module)) for path, module in model.named_modules()} == before
    assert binding.receipt == receipt
    assert [set(interface.valid_keys()) for interface in interfaces] == names
    raises(BindingError, "not in force", applied.undo)
    binding.undo()
    # Names of models that earlier checks left bound may go meanwhile, with these.
    left = [set(interface.valid_keys()) for interface in interfaces]
    assert all(after <= before for after, before in zip(left, unbound, strict=True))


@check
def models_that_it_would_compute_wrongly_are_refused() -> None:
    for config, text in (
        ({"hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 1}, "does not divide 3 query heads"),
        ({"hidden_size": 36, "num_attention_heads": 12, "num_key_value_heads": 3}, "neither divides the other"),
        ({"attn_implementation": "eager"}, "its attention is eager"),
    ):
        model = build("llama", **{"attn_implementation": "sdpa", **config})
        before = dict(vars(model))
        raises(ConfigError, text, lambda model=model: apply_ulysses(model))
        assert dict(vars(model)) == before
    small = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "vocab_size": 64,
    }
    classifier = AutoModelForSequenceClassification.from_config(LlamaConfig(**small, attn_implementation="sdpa"))
    raises(ConfigError, "not that of a causal language model", lambda: apply_ulysses(classifier))
    with torch.device("meta"):
        for family, text in (
            ("mamba", "found 0: none"),
            ("qwen3_next", "its own code computes causal_conv1d"),
            ("bloom", "found 0"),
        ):
            raises(ConfigError, text, lambda family=family: apply_ulysses(build(family, num_hidden_layers=4)))
        for family in ("bart", "mbart", "pegasus"):
            model = build(family, d_model=32, num_hidden_layers=1, attn_implementation="sdpa")
            raises(ConfigError, "computes its loss itself", lambda model=model: apply_ulysses(model))


@check
def rope_that_follows_the_length_is_refused_and_other_rope_is_not() -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 8}
    for rope, refused in (
        ({"rope_type": "longrope", "rope_theta": 1e4, **factors}, True),
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, True),
        ({"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 8}, False),
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}, False),
    ):
        model = build("llama", attn_implementation="sdpa", rope_parameters=rope)
        if refused:
            raises(ConfigError, f"({rope['rope_type']}) depends on", lambda model=model: apply_ulysses(model))
        else:
            apply_ulysses(model).undo()
    by_layer = {
        "full_attention": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    model = build("gemma3_text", attn_implementation="sdpa", rope_parameters=by_layer)
    raises(ConfigError, "(dynamic) depends on", lambda: apply_ulysses(model))


@check
def attention_dropout_is_refused() -> None:
    model = build("llama", attn_implementation="sdpa", attention_dropout=0.1)
    raises(ConfigError, "attention_dropout is 0.1", lambda: apply_ulysses(model))
    small = {"n_embd": 32, "n_layer": 1, "n_head": 4, "attn_implementation": "sdpa"}
    raises(ConfigError, "attn_pdrop is 0.1", lambda: apply_ulysses(build("gpt2", **small)))
    model = build("gpt2", **small, attn_pdrop=0.0)
    apply_ulysses(model)
    for block in model.transformer.h:
        block.attn.attn_dropout.p = 0.2  # a rate that no config tells
    raises(ConfigError, "attention dropout (0.2) is not supported", lambda: model(tokens(2, LENGTH)))


@check
def transformers_own_flash_attention_is_refused() -> None:
    for name in ("flash_attention_2", "flash_attention_3", "flash_attention_4"):
        model = build("llama", attn_implementation="sdpa")
        model.config._attn_implementation_internal = name  # as if its package were installed
        raises(ConfigError, f"transformers' own {name}", lambda model=model: apply_ulysses(model))


@check
def attention_that_is_chosen_afterwards_is_refused_at_the_call() -> None:
    batch = causal_batch()
    model = build("llama", attn_implementation="sdpa")
    applied = apply_ulysses(model)
    binding = bind(model, {"preset": "eager", "attn_implementation": "by_lengths"}, registry=registry())
    raises(BindingError, "after apply_ulysses", lambda: model(**batch))
    binding.undo()
    model(**batch)
    model.set_attn_implementation("sdpa")
    raises(BindingError, "set to sdpa after apply_ulysses", lambda: model(**batch))
    applied.undo()


@check
def positions_that_a_model_counts_by_its_mask_are_asked_for() -> None:
    small = {"ffn_dim": 48, "word_embed_proj_dim": 32, "attn_implementation": "sdpa", "dropout": 0.0}
    reference, model = (build("opt", **small) for _ in range(2))
    apply_ulysses(model)
    batch = causal_batch()
    mask = torch.ones_like(batch["input_ids"])
    torch.testing.assert_close(model(**batch, attention_mask=mask).loss, reference(**batch).loss)
    mask[1, :5] = 0
    batch |= {"attention_mask": mask}
    raises(ConfigError, "Pass position_ids", lambda: model(**batch))
    positions = (mask.cumsum(1) * mask - 1).long()
    torch.testing.assert_close(model(**batch, position_ids=positions).loss, reference(**batch).loss)


@check
def inputs_that_it_would_cut_wrongly_are_refused_on_every_rank() -> None:
    model = build("llama", attn_implementation="sdpa")
    apply_ulysses(model)
    ids = tokens(2, LENGTH)
    raises(ConfigError, f"a sequence of {LENGTH + 1} can't be split", lambda: model(tokens(2, LENGTH + 1)))
    raises(ConfigError, "keeps no cache", lambda: model(ids, use_cache=True))
    raises(ConfigError, "logits_to_keep", lambda: model(ids, logits_to_keep=1))
    raises(ConfigError, "pixel_values", lambda: model(ids, pixel_values=torch.zeros(1, 3)))
    raises(BindingError, "outside of the model", lambda: model.model(ids))
    other = build("llama", attn_implementation="sdpa")
    apply_ulysses(other)
    raises(HostError, "different batches", lambda: other(tokens(2, LENGTH, seed=rank())))
    raises(HostError, "they differ in input_ids", lambda: other(tokens(2, LENGTH + rank())))
    labels, mask = tokens(2, LENGTH, seed=rank()), torch.ones_like(ids)
    mask[0, LENGTH - rank() :] = 0
    embeds = torch.randn(2, LENGTH, 32, generator=torch.Generator().manual_seed(rank()))
    raises(HostError, "they differ in labels)", lambda: other(ids, labels=labels))
    raises(HostError, "they differ in attention_mask)", lambda: other(ids, attention_mask=mask))
    raises(HostError, "they differ in position_ids)", lambda: other(ids, position_ids=packed_positions() + rank()))
    raises(HostError, "they differ in inputs_embeds)", lambda: other(inputs_embeds=embeds))
    raises(HostError, "num_items_in_batch)", lambda: other(ids, num_items_in_batch=torch.tensor(5 + rank())))
    raises(HostError, "they differ in image_sizes)", lambda: other(ids, image_sizes=[(8, 8), (8, 9 + rank())]))
    raises(ConfigError, "ignore_index=0", lambda: other(ids, labels=ids, ignore_index=0))
    other(ids)
