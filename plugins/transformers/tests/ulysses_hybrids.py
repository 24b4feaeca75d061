"""Models with delta rules, scans and causal convolutions over ranks: loss and gradients are those of one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, distributed
from transformers import PreTrainedModel
from ulysses_models import packed_positions, registry
from ulysses_ranks import check, raises, size

from models import build, tokens
from veomni_core import bind
from veomni_core.errors import BindingError, ConfigError
from veomni_transformers.sequence import apply_ulysses, slice_input_tensor
from veomni_transformers.sequence.order import Order
from veomni_transformers.sequence.recurrence import by_heads

LENGTH = 16
MIXERS = ("causal_conv1d", "chunk_gated_delta_rule", "kda", "mamba2_scan")
OPS = {
    "preset": "eager",
    "attn_implementation": "sdpa",
    "allow_unused": True,
    **{f"{op}_implementation": "one" for op in MIXERS},
}
WIDTHS = {"linear_key_head_dim": 8, "linear_value_head_dim": 4, "linear_conv_kernel_dim": 4}
TWO = {"layer_types": ["linear_attention", "full_attention"], "attn_implementation": "sdpa"}
DELTA = {**WIDTHS, "linear_num_key_heads": 2, "linear_num_value_heads": 4, **TWO}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "experts_implementation": "eager"}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 4}
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 24, "output_router_logits": True},
    "qwen3_5_text": DELTA,
    "olmo_hybrid": DELTA,
    "kimi_linear": {
        **{**TWO, **EXPERTS, "linear_num_heads": 4, "linear_head_dim": 8, "mlp_layer_types": ["dense", "sparse"]},
        **{"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": None, "v_head_dim": 8},
        **{"qk_nope_head_dim": 8, "qk_rope_head_dim": 8},
    },
    "bamba": {**MAMBA, "attn_layer_indices": [1], "attn_implementation": "sdpa", "mamba_expand": 2},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64, "attn_implementation": "sdpa"},
    "nemotron_h": {
        **{"layers_block_type": ["mamba", "attention", "mlp"], "attn_implementation": "sdpa", "num_hidden_layers": 3},
        **{"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 4},
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "attn_implementation": "sdpa"},
}


def bound(family: str, dtype: torch.dtype = torch.float64, **config: Any) -> PreTrainedModel:
    """A bound model; kernels declare no float64, so none is bound in it, but these compute in any dtype."""
    model = build(family, **{**HYBRIDS[family], **config})
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:  # so large that what one token gives to the next shows in the loss
                parameter.mul_(0.7 * parameter[0].numel() ** -0.5 / parameter.std())
    state = {name: each.to(dtype) for name, each in model.state_dict().items()}
    bind(model, OPS, registry=registry())
    model.to(dtype).load_state_dict(state)
    return model


def batches(length: int = LENGTH) -> dict[str, dict[str, Any]]:
    """Rows that are whole, packed in every way, or padded; sequences of one token, and ends at a part's end."""
    ids = tokens(2, length)
    labels = ids.clone()
    labels[0, length // 2 - 1] = -100
    one, several = ({"input_ids": ids[:rows], "labels": labels[:rows]} for rows in (1, 2))
    at_ends = torch.arange(length)[None] % (length // size())
    bounds = torch.tensor([0, 3 * length // 16, 3 * length // 16 + 1, length], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": length, "max_length_k": length}
    positions = torch.cat([torch.arange(each) for each in bounds.diff().tolist()])[None]
    mask = torch.ones_like(ids)
    mask[0, :3] = mask[1, -5:] = 0
    return {
        "whole": several,
        "packed": {**one, "position_ids": packed_positions()[:, -length:]},
        "packed at the ends of parts": {**one, "position_ids": at_ends},
        "packed rows": {**several, "position_ids": torch.cat([at_ends, positions])},
        "with bounds": {**one, "position_ids": positions, **lengths},
        "padded": {**several, "labels": labels.where(mask.bool(), -100), "attention_mask": mask},
    }


def compare(
    family: str, names: tuple[str, ...] = (), length: int = LENGTH, apply: Any = apply_ulysses, **config: Any
) -> None:
    reference, model = (bound(family, **config) for _ in range(2))
    with apply(model), pytest.MonkeyPatch.context() as patch:
        if apply is not apply_ulysses:  # sums of float32 decays depend on their order; rings have another
            patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        for name, batch in batches(length).items():
            if name == "padded" and apply is not apply_ulysses:
                batch["labels"][0, 3] = -100  # else a token of padding learns it
            if not names or name in names:
                assert_same(model, reference, batch, name)


def assert_same(model: Any, reference: Any, batch: dict[str, Any], what: str) -> None:
    for each in (model, reference):
        each.zero_grad()
    wanted = reference(**batch)
    found = model(**batch)
    wanted.loss.backward()
    found.loss.backward()
    torch.testing.assert_close(found.loss, wanted.loss, rtol=1e-6, atol=0, msg=lambda text: f"{what}: {text}")
    mine = dict(model.named_parameters())
    for name, parameter in reference.named_parameters():
        if parameter.grad is not None:
            gradient = mine[name].grad if mine[name].grad is not None else torch.zeros_like(mine[name])
            distributed.all_reduce(gradient)
            off, of = (float(each.norm()) for each in (gradient / size() - parameter.grad, parameter.grad))
            assert off <= 1e-6 * of + 1e-12, f"{what}: the gradient of {name} is off by {off:.1e} of {of:.1e}"


@check
def gated_delta_rules() -> None:
    compare("qwen3_next", router_aux_loss_coef=1.0)
    compare("qwen3_5_text")
    compare("olmo_hybrid")


@check
def kimis_delta_attention() -> None:
    compare("kimi_linear")


@check
def scans_of_mamba_2() -> None:
    compare("bamba")
    compare("falcon_h1")
    compare("nemotron_h")


@check
def short_convolutions() -> None:
    compare("lfm2")


@check
def a_hybrid_that_is_packed_or_padded() -> None:
    compare("falcon_h1", ("packed", "padded"))


@check
def heads_and_groups_that_ranks_do_not_divide() -> None:
    names = ("whole", "packed")
    for key, value in ((3, 3), (3, 6), (1, 4), (5, 5)):
        compare("qwen3_5_text", names, linear_num_key_heads=key, linear_num_value_heads=value)
    for heads, groups in ((6, 3), (9, 3), (12, 3)):
        compare("nemotron_h", names, mamba_num_heads=heads, n_groups=groups)


@check
def parts_that_are_shorter_than_a_convolution() -> None:
    for part in (1, 2):
        compare("qwen3_5_text", ("whole", "packed at the ends of parts", "with bounds"), part * size())
        compare("lfm2", ("whole", "packed at the ends of parts"), part * size())


@check
def a_decay_keeps_its_precision_and_a_value_head_its_key() -> None:
    def rule(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> Any:
        assert query.shape[1] == 2 * size() and g.dtype == torch.float32
        served = value.shape[2] // key.shape[2]
        return value * key.repeat_interleave(served, 2) + query.repeat_interleave(served, 2) * (g * beta)[
            ..., None
        ], None

    over_ranks = by_heads(rule, Order(distributed.group.WORLD, None), ("query", "key", "value", "g", "beta"))
    for keys, values in ((4, 4), (1, 4), (3, 6), (5, 5), (3, 3)):
        shapes = (*(2 * ((1, 2 * size(), keys, 8),)), (1, 2 * size(), values, 8), *(2 * ((1, 2 * size(), values),)))
        whole = [
            torch.randn(shape).to(torch.float32 if place == 3 else torch.bfloat16) for place, shape in enumerate(shapes)
        ]
        output, _ = over_ranks(*(slice_input_tensor(each, 1) for each in whole))
        assert torch.equal(output, slice_input_tensor(rule(*whole)[0], 1)), (keys, values)


@check
def layers_that_are_computed_again_in_backward() -> None:
    reference, model = (bound("falcon_h1") for _ in range(2))
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        with apply_ulysses(model):
            for name in ("packed", "padded"):
                assert_same(model, reference, batches()[name], name)


@check
def an_adapter_around_a_hybrid() -> None:
    models = [bound("qwen3_5_text") for _ in range(2)]
    applied = apply_ulysses(models[0])
    config = LoraConfig(r=4, target_modules=["in_proj_qkv", "out_proj", "q_proj"], init_lora_weights=False)
    adapted = []
    for each in models:
        torch.manual_seed(3)
        adapted.append(get_peft_model(each, config))
    assert_same(*adapted, batches()["packed"], "an adapter")
    adapted[0].unload()
    applied.undo()


@check
def undo_leaves_the_bound_hybrid() -> None:
    reference, model = (bound("qwen3_next") for _ in range(2))
    before = {path: (type(module), dict(vars(module))) for path, module in model.named_modules()}
    applied = apply_ulysses(model)
    applied.undo()
    assert {path: (type(module), dict(vars(module))) for path, module in model.named_modules()} == before
    batch = batches()["packed"]
    assert torch.equal(model(**batch).loss, reference(**batch).loss)
    raises(BindingError, "not in force", applied.undo)


@check
def a_hybrid_compiles_as_one_graph() -> None:
    model = bound("falcon_h1", torch.float32, num_hidden_layers=1)
    apply_ulysses(model)
    batch = batches()["whole"]
    wanted = model(**batch).loss
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**batch).loss, wanted)


@check
def layers_whose_own_code_mixes_positions_are_refused_with_the_line_to_write() -> None:
    model = build("qwen3_next", **HYBRIDS["qwen3_next"])
    said = "its own code computes chunk_gated_delta_rule in model.layers.0.linear_attn (the model is not bound)"
    raises(ConfigError, said, lambda: apply_ulysses(model))
    raises(ConfigError, "chunk_gated_delta_rule_implementation: auto", lambda: apply_ulysses(model))
    bind(model, {**OPS, "causal_conv1d_implementation": "eager"}, registry=registry())
    raises(ConfigError, "its own code computes causal_conv1d in model.layers.0", lambda: apply_ulysses(model))


def refused(family: str, text: str, **config: Any) -> None:
    with torch.device("meta"):
        model = build(family, num_hidden_layers=2, attn_implementation="sdpa", **config)
    raises(ConfigError, text, lambda: apply_ulysses(model))


@check
def layers_that_mix_positions_otherwise_are_refused_by_name() -> None:
    refused("llama4_text", "of type chunked_attention", layer_types=["chunked_attention", "full_attention"])
    state = "mamba (JambaMambaMixer) carries along the sequence what its own code computes"
    refused("jamba", state, attn_layer_period=2, attn_layer_offset=1)


@check
def lightning_attention_is_refused() -> None:
    refused("minimax", "layers of type linear_attention", layer_types=["linear_attention", "full_attention"])
