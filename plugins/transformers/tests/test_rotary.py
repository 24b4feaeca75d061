"""Rotary variants: told apart by their contracts, bound as a model calls them, relying on what it hands over."""

from __future__ import annotations

import inspect
from itertools import permutations

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaConfig
from transformers.models.llama import modeling_llama
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

from counting_kernels import calls, counting_registry
from veomni_conformance import check_kernel
from veomni_core import KernelSpec, bind, find_sites
from veomni_ops import rotary_pos_emb, rotary_pos_emb_vision
from veomni_ops.rotation import AngleLayout
from veomni_transformers.proving.functions import with_globals

REGISTRY = counting_registry("one")
CONTRACTS = [*rotary_pos_emb.CONTRACTS.values(), *rotary_pos_emb_vision.CONTRACTS.values()]
# A partial rotation of a whole head is the full one: these kernels may serve the narrower variant too.
WIDER = {("full", "partial"), ("pairwise", "pairwise_partial"), ("interleaved", "interleaved_partial")}


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "contracts", [rotary_pos_emb.CONTRACTS, rotary_pos_emb_vision.CONTRACTS], ids=["text", "vision"]
)
def test_no_variant_passes_for_another(contracts, dtype):
    for asked, other in permutations(contracts, 2):
        reference = contracts[other].reference
        spec = KernelSpec("other", contracts[asked].op_name, asked, f"{reference.__module__}:{other}", dtypes=(dtype,))
        assert check_kernel(spec, "cpu", dtype, fail_fast=True).ok is ((asked, other) in WIDER), (asked, other)


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: f"{contract.op_name}/{contract.variant}")
def test_no_gradient_reaches_cos_and_sin(contract):
    for sample in contract.samples(torch.device("cpu"), torch.float32):
        *rotated, cos, sin = sample.args
        cos.requires_grad_(), sin.requires_grad_()
        result = contract.reference(*rotated, cos, sin, **sample.kwargs)
        loss = sum(part.square().sum() for part in (result if isinstance(result, tuple) else (result,)))
        assert torch.autograd.grad(loss, (cos, sin), allow_unused=True) == (None, None)


@pytest.mark.parametrize("layout", AngleLayout)
def test_a_layout_knows_its_own(layout):
    angles = torch.randn(2, 5, 8)
    assert layout.holds(layout.spread(angles))
    wrong = {AngleLayout.HALVES: AngleLayout.NEIGHBOURS, AngleLayout.NEIGHBOURS: AngleLayout.HALVES}.get(layout)
    assert wrong is None or not layout.holds(wrong.spread(angles))


class TwoGrids(modeling_llama.LlamaRotaryEmbedding):
    """Angles of rows in one half and of columns in the other."""

    def forward(self, x, position_ids):
        cos, sin = super().forward(x, position_ids)
        half = cos.shape[-1] // 2
        return tuple(torch.cat((a[..., :half], a[..., half:].flip(-1)), dim=-1) for a in (cos, sin))


class OneTensor(modeling_llama.LlamaRotaryEmbedding):
    """Gives no cos and sin that could be looked at."""

    def forward(self, x, position_ids):
        return super().forward(x, position_ids)[0]


def rotary_sites(
    embedding: type[nn.Module], function=modeling_llama.apply_rotary_pos_emb
) -> list[tuple[str | None, str]]:
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1)
    config._attn_implementation = "eager"
    kind = type("Attention", (modeling_llama.LlamaAttention,), {})
    kind.forward = with_globals(kind.forward, {"apply_rotary_pos_emb": function})
    model = nn.ModuleList([kind(config, 0), embedding(config)])
    return [(s.variant, s.evidence) for s in find_sites(model, REGISTRY) if s.op_name == "rotary_pos_emb"]


def test_a_kernel_that_may_read_either_half_is_bound_only_where_they_are_the_same():
    ((variant, evidence),) = rotary_sites(modeling_llama.LlamaRotaryEmbedding)
    assert (variant, "both halves the same" in evidence) == ("full", True)
    ((variant, evidence),) = rotary_sites(TwoGrids)
    assert (variant, "is full, but its cos and sin don't have both halves the same" in evidence) == (None, True)


def of_second_half(q, k, cos, sin):
    return modeling_llama.apply_rotary_pos_emb(q, k, *(a[..., a.shape[-1] // 2 :].repeat(1, 1, 2) for a in (cos, sin)))


def test_which_half_a_function_reads_counts_only_where_they_differ():
    ((variant, _),) = rotary_sites(modeling_llama.LlamaRotaryEmbedding, of_second_half)
    assert variant == "full"
    ((variant, evidence),) = rotary_sites(TwoGrids, of_second_half)
    assert (variant, "not full: q misses by" in evidence) == (None, True)


def test_without_an_embedding_that_shows_its_angles_nothing_is_bound():
    ((variant, evidence),) = rotary_sites(OneTensor)
    assert variant is None and "no rotary embedding near it could be run" in evidence


def step(model: nn.Module, run) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad(set_to_none=True)
    result = run(model)
    result.square().mean().backward()
    return result.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_bound_equals_eager(model: nn.Module, field: str, run, wanted_calls: set[tuple[str, str]]) -> None:
    wanted = step(model, run)
    calls.clear()
    with bind(model, {"preset": "eager", field: "one"}, registry=REGISTRY):
        found = step(model, run)
    assert {key[:2] for key in calls} == wanted_calls
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    calls.clear()
    step(model, run)
    assert not calls


def test_a_vision_tower_is_bound():
    config = Qwen2VLVisionConfig(depth=2, embed_dim=32, num_heads=2, hidden_size=32, mlp_ratio=2)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    tower = Qwen2VisionTransformerPretrainedModel(config).train()
    patches = torch.randn(16, 3 * 2 * 14 * 14)
    grid = torch.tensor([[1, 4, 4]])

    def run(model):
        result = model(patches, grid_thw=grid)
        return result if isinstance(result, torch.Tensor) else result[0]

    field = "rotary_pos_emb_vision_implementation"
    assert_bound_equals_eager(tower, field, run, {("rotary_pos_emb_vision", "full")})


@pytest.mark.skipif("gemma4_text" not in CONFIG_MAPPING, reason="this transformers has no Gemma 4")
def test_a_function_of_one_tensor_is_bound():
    config = CONFIG_MAPPING["gemma4_text"](
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        global_head_dim=32,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=64,
        num_kv_shared_layers=0,
        layer_types=["sliding_attention", "full_attention"],
        pad_token_id=0,
    )
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).train()
    ids = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    widths = {tuple(b.shape) for n, b in model.named_buffers() if n.endswith("_inv_freq")}
    assert len(widths) == 2
    field = "rotary_pos_emb_implementation"
    run = lambda model: model(input_ids=ids, use_cache=False).logits  # noqa: E731
    assert_bound_equals_eager(model, field, run, {("rotary_pos_emb", "single")})


def test_every_contract_says_what_its_kernels_may_rely_on():
    assert rotary_pos_emb.LAYOUTS.keys() == rotary_pos_emb.CONTRACTS.keys()
    for contract in rotary_pos_emb.CONTRACTS.values():
        takes_one = "k" not in inspect.signature(contract.reference).parameters
        assert takes_one == contract.variant.startswith("single")
