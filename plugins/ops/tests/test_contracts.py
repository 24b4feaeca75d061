"""Each contract holds for its own reference, and each reference is what transformers computes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import Gemma3TextConfig, LlamaConfig, Olmo2Config, Qwen3MoeConfig
from transformers.loss.loss_utils import ForCausalLMLoss, ForSequenceClassificationLoss
from transformers.models.doge import modeling_doge
from transformers.models.gemma3.modeling_gemma3 import Gemma3MLP, Gemma3RMSNorm
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.llama import modeling_llama
from transformers.models.llama4.modeling_llama4 import Llama4TextL2Norm
from transformers.models.mixtral import modeling_mixtral
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3_moe import modeling_qwen3_moe
from transformers.models.switch_transformers import modeling_switch_transformers

from veomni_conformance import check_kernel
from veomni_core import KernelSpec
from veomni_ops import (
    attention,
    cross_entropy_loss,
    load_balancing_loss,
    moe_experts,
    rms_norm,
    rotary_pos_emb,
    swiglu_mlp,
)
from veomni_ops.catalog import OPS
from veomni_ops.contract import Size, contract_for

DTYPES = ("float32", "bfloat16", "float16")
HALF_AND_FULL = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
DEAR = ("exchanged", "native_sparse")
VARIANTS = [
    # Token dispatch starts four processes, and native sparse attention takes longest of all others. make test checks
    # kernels of both.
    pytest.param(op, variant, id=f"{op.name}/{variant}", marks=[pytest.mark.thorough] * (variant in DEAR))
    for op in OPS
    for variant in op.variants
]


def as_kernel(contract, device="cpu"):
    makers = (contract.samples, contract.beyond_a_tile)
    samples = [sample for maker in makers for sample in maker(torch.device("cpu"), torch.float32)]
    features = tuple({need for sample in samples for need in sample.needs})
    factory = f"{contract.reference.__module__}:{contract.reference.__qualname__}"
    deterministic = device == "cpu"  # on a GPU index_add adds by atomics
    spec = (contract.op_name, contract.variant, factory)
    return KernelSpec("reference", *spec, features=features, deterministic=deterministic)


@pytest.mark.thorough(one_per=["device", "op"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op, variant", VARIANTS)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_each_reference_passes_its_own_contract(device, op, variant, dtype, extent):
    spec = as_kernel(contract_for(op, variant), device)
    report = check_kernel(spec, device, dtype, **extent)
    report.raise_if_failed()
    assert len(report.cases) >= 3
    exact = not any(each.element for each in contract_for(op, variant).gradients.values())  # its results are integers
    assert any(case.worst_gradient > 0 for case in report.cases) or dtype == "float32" or exact


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_samples_ask_for_no_more_than_their_dtype_holds(dtype):
    """Of gradients that shrink with the tokens; the large samples of other ops take minutes on a CPU."""
    contract = load_balancing_loss.CONTRACTS["standard"]
    check_kernel(as_kernel(contract), "cpu", dtype, largest=Size.LARGE, every_form=False).raise_if_failed()


def _backward(result, inputs, upstream=None):
    upstream = torch.ones_like(result) if upstream is None else upstream
    return torch.autograd.grad(result, inputs, upstream)


def _assert_same(mine, theirs, inputs, *, exact=True):
    tolerance = {"rtol": 0, "atol": 0} if exact else {}
    torch.testing.assert_close(mine, theirs, **tolerance)
    upstream = torch.randn_like(theirs)
    for one, other in zip(_backward(mine, inputs, upstream), _backward(theirs, inputs, upstream), strict=True):
        torch.testing.assert_close(one, other, **tolerance)


@HALF_AND_FULL
@pytest.mark.parametrize(
    "reference, module",
    [
        (rms_norm.standard, lambda: modeling_llama.LlamaRMSNorm(48, 1e-5)),
        (rms_norm.cast_after, lambda: Olmo2RMSNorm(48, 1e-5)),
        (rms_norm.offset, lambda: Gemma3RMSNorm(48, 1e-5)),
        (rms_norm.unweighted, lambda: Llama4TextL2Norm(1e-5)),
    ],
    ids=["Llama", "Olmo2", "Gemma3", "Llama4TextL2Norm"],
)
def test_rms_norm(reference, module, dtype):
    norm = module()
    for parameter in norm.parameters():
        nn.init.normal_(parameter, mean=0.5)
    x = torch.randn(3, 7, 48, dtype=dtype, requires_grad=True)
    weight = getattr(norm.to(dtype), "weight", None)
    _assert_same(reference(x, weight, 1e-5), norm(x), [x, *norm.parameters()])


@HALF_AND_FULL
@pytest.mark.parametrize("share, source", [(1.0, modeling_llama), (0.5, modeling_gpt_neox)], ids=["Llama", "GPT-NeoX"])
def test_rotary_pos_emb(share, source, dtype):
    q = torch.randn(2, 4, 9, 32, dtype=dtype, requires_grad=True)
    k = torch.randn(2, 2, 9, 32, dtype=dtype, requires_grad=True)
    angles = torch.randn(2, 9, int(16 * share)).repeat(1, 1, 2)
    reference = rotary_pos_emb.full if share == 1.0 else rotary_pos_emb.partial
    arguments = (q, k, angles.cos().to(dtype), angles.sin().to(dtype))
    for mine, theirs, x in zip(reference(*arguments), source.apply_rotary_pos_emb(*arguments), (q, k), strict=True):
        _assert_same(mine, theirs, [x])


@HALF_AND_FULL
def test_swiglu_mlp(dtype):
    for reference, module in (
        (swiglu_mlp.standard, modeling_llama.LlamaMLP(LlamaConfig(hidden_size=64, intermediate_size=24))),
        (swiglu_mlp.gelu_tanh, Gemma3MLP(Gemma3TextConfig(hidden_size=64, intermediate_size=24))),
    ):
        module.to(dtype)
        x = torch.randn(5, 64, dtype=dtype, requires_grad=True)
        mine = module.down_proj(reference(module.gate_proj(x), module.up_proj(x)))
        _assert_same(mine, module(x), [x, *module.parameters()])


@pytest.mark.parametrize("items", [None, 23])
def test_causal_cross_entropy_loss(items):
    hidden, weight = torch.randn(2, 9, 16, requires_grad=True), torch.randn(31, 16, requires_grad=True)
    labels = torch.randint(31, (2, 9))
    labels[0, :4] = -100
    theirs = ForCausalLMLoss(F.linear(hidden, weight), labels, 31, num_items_in_batch=items)
    shifted = F.pad(labels, (0, 1), value=-100)[:, 1:]
    mine = cross_entropy_loss.causal(hidden.flatten(0, 1), weight, shifted.flatten(), num_items_in_batch=items)
    _assert_same(mine, theirs, [hidden, weight], exact=False)


def test_the_parts_of_all_shards_give_transformers_causal_loss():
    hidden, weight = torch.randn(18, 16, requires_grad=True), torch.randn(31, 16, requires_grad=True)
    labels = torch.randint(31, (18,))
    labels[:4] = -100
    theirs = ForCausalLMLoss(F.linear(hidden, weight) * 0.5, None, 31, shift_labels=labels)
    part = cross_entropy_loss.CONTRACTS["vocabulary_parallel"].reference
    parts = [part(hidden, shard, labels, 12 * rank, scale=0.5) for rank, shard in enumerate(weight.split(12))]
    sums, label_logits = (torch.stack(each) for each in zip(*parts, strict=True))
    losses = torch.logsumexp(sums, dim=0) - label_logits.sum(dim=0)
    _assert_same(losses[labels != -100].mean(), theirs, [hidden, weight], exact=False)


def test_a_batch_without_a_label_that_counts_gives_zero_where_transformers_gives_nan():
    hidden, weight = torch.randn(4, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    labels = torch.full((4,), -100)
    assert ForCausalLMLoss(F.linear(hidden, weight), None, 11, shift_labels=labels).isnan()
    mine = cross_entropy_loss.causal(hidden, weight, labels)
    assert mine == 0
    assert not any(gradient.any() for gradient in _backward(mine, [hidden, weight]))


def test_sequence_classification_loss():
    logits, labels = torch.randn(6, 4, requires_grad=True), torch.randint(4, (6,))
    config = SimpleNamespace(problem_type=None, num_labels=4)
    _assert_same(
        cross_entropy_loss.seq_cls(logits, labels), ForSequenceClassificationLoss(labels, logits, config), [logits]
    )


@HALF_AND_FULL
@pytest.mark.parametrize(
    "experts, config",
    [
        (modeling_qwen3_moe.Qwen3MoeExperts, {"num_experts": 5}),
        (modeling_mixtral.MixtralExperts, {"num_local_experts": 5, "intermediate_size": 8}),
    ],
    ids=["Qwen3-MoE", "Mixtral"],
)
def test_moe_experts(experts, config, dtype):
    kind = Qwen3MoeConfig if "num_experts" in config else modeling_mixtral.MixtralConfig
    settings = kind(hidden_size=12, **config, **({"moe_intermediate_size": 8} if kind is Qwen3MoeConfig else {}))
    settings._experts_implementation = "eager"
    module = experts(settings).to(dtype)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    hidden = torch.randn(9, 12, dtype=dtype, requires_grad=True)
    weights, index = torch.rand(9, 5).softmax(-1).topk(2)
    weights = weights.to(dtype).requires_grad_()
    mine = moe_experts.standard(hidden, index, weights, module.gate_up_proj, module.down_proj)
    inputs = [hidden, weights, *module.parameters()]
    if dtype == torch.float32:
        _assert_same(mine, module(hidden, index, weights), inputs, exact=False)
    else:  # transformers rounds every expert's share; the reference rounds once
        torch.testing.assert_close(mine, module(hidden, index, weights), rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("source", [modeling_qwen3_moe, modeling_mixtral], ids=["Qwen3-MoE", "Mixtral"])
@pytest.mark.parametrize("masked", [False, True])
def test_load_balancing_loss(source, masked):
    logits = tuple(torch.randn(12, 6, requires_grad=True) for _ in range(3))
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0]]) if masked else None
    mine = load_balancing_loss.standard(logits, 6, 2, mask)
    _assert_same(mine, source.load_balancing_loss_func(logits, 6, 2, mask), logits, exact=False)


@pytest.mark.parametrize("choices", [(), (2,)], ids=["one expert", "two experts"])
def test_load_balancing_loss_given_routes(choices):
    probabilities = torch.rand(2, 6, 5).softmax(-1).requires_grad_()
    index = torch.randint(0, 5, (2, 6, *choices))
    mine = load_balancing_loss.given_routes(probabilities, index)
    theirs = modeling_switch_transformers.load_balancing_loss_func(probabilities, index)
    _assert_same(mine, theirs, [probabilities], exact=False)


@pytest.mark.parametrize("masked", [False, True])
def test_load_balancing_loss_of_product_keys(masked):
    logits = tuple(torch.randn(2, 12, 3, requires_grad=True) for _ in range(3))
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0]]) if masked else None
    mine = load_balancing_loss.product_keys(logits, 9, 3, 2, mask)
    _assert_same(mine, modeling_doge.load_balancing_loss_func(logits, 9, 3, 2, mask), logits, exact=False)


@HALF_AND_FULL
def test_attention(dtype):
    module = SimpleNamespace(num_key_value_groups=2, training=True, is_causal=True)
    query, key, value = (torch.randn(2, heads, 7, 16, dtype=dtype, requires_grad=True) for heads in (4, 2, 2))
    mask = torch.full((2, 1, 7, 7), torch.finfo(dtype).min, dtype=dtype).triu(1)
    theirs, _ = modeling_llama.eager_attention_forward(module, query, key, value, mask, 0.25)
    mine, _ = attention.standard(module, query, key, value, mask, 0.25)
    _assert_same(mine, theirs, [query, key, value])


def test_attention_with_a_bias_and_sinks_of_each_query():
    modeling_inkling2 = pytest.importorskip("transformers.models.inkling2.modeling_inkling2")
    module = attention.AttentionModule(num_key_value_groups=2)
    query, key, value = (torch.randn(2, heads, 5, 8, requires_grad=True) for heads in (4, 2, 2))
    bias, sinks = torch.randn(2, 4, 5, 5, requires_grad=True), torch.randn(2, 4, 5, 1, requires_grad=True)
    mask = torch.full((1, 1, 5, 5), float("-inf")).triu(1)
    inputs, options = (query, key, value, bias, sinks), {"position_bias": bias, "sinks": sinks}
    theirs, _ = modeling_inkling2.eager_attention_forward(module, query, key, value, mask, 0.25, **options)
    mine, _ = attention.standard(module, query, key, value, None, 0.25, **options)
    _assert_same(mine, theirs, inputs, exact=False)


def test_attention_to_chosen_keys_is_attention_with_a_mask_of_them():
    module = attention.AttentionModule(num_key_value_groups=1)
    query, key, value = inputs = [torch.randn(1, 2, 3, 8, requires_grad=True) for _ in range(3)]
    indices = torch.tensor([[[0, 2], [1, 2], [0, 2]]])  # the first query's second and the second's are still to come
    mask = torch.tensor([[[[True, False, False], [False, True, False], [True, False, True]]]])
    mine, _ = attention.standard(module, query, key, value, None, indices=indices)
    _assert_same(mine, attention.standard(module, query, key, value, mask)[0], inputs)


def test_the_variants_of_rms_norm_differ_by_more_than_their_contracts_allow():
    """What float32 can't tell apart, bf16's rounding does: Llama's norm is not OLMo 2's."""
    for wrong in ("cast_after", "offset"):
        spec = KernelSpec("wrong", "rms_norm", "standard", f"veomni_ops.rms_norm:{wrong}")
        assert not check_kernel(spec, "cpu", "bfloat16").ok
    as_llama = KernelSpec("wrong", "rms_norm", "cast_after", "veomni_ops.rms_norm:standard")
    assert check_kernel(as_llama, "cpu", "float32").ok
    failures = check_kernel(as_llama, "cpu", "bfloat16").failures
    assert any("rounded elsewhere than the reference" in failure for failure in failures)


def test_olmo2_is_built_as_cast_after_and_llama_as_standard():
    """The names of the two variants go with the families they are named for."""
    x = torch.randn(64, 48, dtype=torch.bfloat16)
    weight = torch.rand(48, dtype=torch.bfloat16)
    config = Olmo2Config(hidden_size=48)
    norm = Olmo2RMSNorm(48, config.rms_norm_eps).to(torch.bfloat16)
    norm.weight.data.copy_(weight)
    assert torch.equal(norm(x), rms_norm.cast_after(x, weight, config.rms_norm_eps))
    assert not torch.equal(norm(x), rms_norm.standard(x, weight, config.rms_norm_eps))


@pytest.mark.parametrize("variant", ["standard", "sigmoid", "gate_first"])
def test_a_gated_norm_in_groups_norms_each_group_alone(variant):
    norm = contract_for(next(op for op in OPS if op.name == "rms_norm_gated"), variant).reference
    x, gate, weight = torch.randn(3, 64), torch.randn(3, 64), torch.randn(64)
    groups = [norm(*parts, 1e-6) for parts in zip(x.split(16, -1), gate.split(16, -1), weight.split(16), strict=True)]
    torch.testing.assert_close(norm(x, gate, weight, 1e-6, 16), torch.cat(groups, dim=-1))
    assert not torch.allclose(norm(x, gate, weight, 1e-6), torch.cat(groups, dim=-1))
