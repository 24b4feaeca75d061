"""A token has the same bits in training and in rollouts, where that is required; or what differs is named."""

from __future__ import annotations

import importlib
import inspect
import itertools

import pytest
import torch
from torch.nn import functional as F
from transformers.models.qwen3_moe import modeling_qwen3_moe
from transformers.models.qwen3_next import modeling_qwen3_next
from typer.testing import CliRunner

from models import build
from tiny_models import tiny_model
from veomni_core import bind
from veomni_core.cli.app import build_app
from veomni_core.errors import ConfigError
from veomni_torch import attention_in_fixed_order, fixed_order
from veomni_transformers.parity import OWN, check_parity
from veomni_transformers.whole_vectors import _Vectors, in_whole_vectors

SAME = {
    "preset": "auto",
    "require": "batch_invariant",
    "linear_implementation": "fixed_order",
    "token_logprobs_implementation": "fixed_order",
}
ON = {
    "cpu": SAME,
    "cuda": {**SAME, "linear_implementation": "triton", "token_logprobs_implementation": "triton_fixed_order"},
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
QWEN3_NEXT = {
    **{"num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **{"layer_types": ["linear_attention", "full_attention"], "output_router_logits": False},
}
GPT_OSS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "output_router_logits": False}
FAMILIES = {
    **{"llama": {}, "qwen3": {}, "qwen3_moe": {"output_router_logits": False}},
    **{"gpt_oss": GPT_OSS, "deepseek_v3": {}, "qwen3_next": QWEN3_NEXT},
}
LAYOUTS = ["each sequence alone", "in a batch of 21", "padded on the left", "padded on the right", "packed"]
LAYOUTS += ["the end token by token, with a cache", "one sequence token by token, with a cache"]


def made(family, dtype=torch.float32):
    return build(family, dtype=dtype, num_experts_per_tok=2, num_local_experts=4, **FAMILIES[family])


@pytest.mark.thorough(one_per=["family", "device"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_layout_gives_the_same_bits(family, dtype, device):
    model = made(family, dtype).to(device)
    with bind(model, ON[device], device=device):
        found = {each.layout: each for each in check_parity(model)}
    assert list(found) == LAYOUTS
    assert [each for each in found.values() if not each.same_bits] == []


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_the_ordinary_plan(family, device):
    ids = torch.randint(64, (2, 19), generator=torch.Generator().manual_seed(3)).to(device)
    steps = []
    for config in (ON[device], {"preset": "auto"}):
        model = made(family).to(device)
        with bind(model, config, device=device):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
        steps.append((loss.detach(), {name: each.grad for name, each in model.named_parameters()}))
    (loss, gradients), (wanted, theirs) = steps
    torch.testing.assert_close(loss, wanted, rtol=2e-6, atol=0.0)
    for name, gradient in gradients.items():
        miss = (gradient - theirs[name]).norm() / theirs[name].norm().clamp_min(1e-12)
        assert miss < 2e-5, name


def test_what_the_own_code_gives_is_compared_and_promises_nothing():
    model, own = made("llama"), made("llama")
    with bind(model, SAME, device="cpu"):
        last = check_parity(model, own=own)[-1]
    assert last.layout == OWN and last.largest < 1e-5


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ([[1, 2]], "at least two sequences"),
        (torch.rand(2, 3), "give whole numbers"),
        ([[1, 2], [3, 64]], "from 1 to 64, and the model's vocabulary has 64"),
        ([[1, 2], [3, -4]], "from -4 to 3"),
    ],
)
def test_tokens_that_the_model_has_not_are_refused(ids, says):
    with pytest.raises(ValueError, match=says):
        check_parity(made("llama"), ids)


def test_a_model_that_draws_random_numbers_is_refused_and_one_with_a_cache_of_states_is_decoded():
    with pytest.raises(ConfigError, match="attention_dropout: 0.0"):
        check_parity(build("llama", attention_dropout=0.1))
    scan = {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "num_hidden_layers": 1, "chunk_size": 8}
    last = check_parity(build("mamba2", **scan))[-1]
    assert last.layout == LAYOUTS[-1] and last.largest < 1e-5


def test_weights_that_are_no_numbers_and_wrappers_are_refused():
    """Else the first module with NaN would be the first that differs, and PEFT's own forward takes no positions."""
    model = made("llama")
    with pytest.raises(ConfigError, match="expected a transformers model, not Sequential: .* get_base_model"):
        check_parity(torch.nn.Sequential(model))
    model.lm_head.weight.data[5] = float("nan")
    with pytest.raises(ConfigError, match="no finite numbers: .* NaN among the weights"):
        check_parity(model)


def test_few_positions_are_enough_and_a_layout_that_the_own_code_cannot_run_says_why():
    assert len(check_parity(tiny_model("opt", torch.float32, max_position_embeddings=48))) == len(LAYOUTS)
    *others, decoded, alone = check_parity(tiny_model("bert", torch.float32))
    assert not any(each.why_not for each in others) and not decoded.same_bits
    assert decoded.why_not == alone.why_not == "its forward gives no past_key_values, with which to go on"
    packed = {each.layout: each for each in check_parity(tiny_model("gpt_neo", torch.float32))}["packed"]
    assert packed.why_not.startswith("RuntimeError: The size of tensor") and not packed.same_bits


@pytest.mark.thorough
def test_kimis_delta_attention_has_the_same_bits_too():
    model = tiny_model("kimi_linear", torch.float32)
    with bind(model, SAME, device="cpu"):
        assert [each for each in check_parity(model) if not each.same_bits] == []


def test_a_hybrid_model_is_refused_with_the_layer_that_cannot():
    model = made("qwen3_next")
    with bind(model, {**SAME, "chunk_gated_delta_rule_implementation": "eager"}, device="cpu") as binding:
        found = {each.layout: each for each in check_parity(model)}
        promises = " ".join(binding.receipt.to_dict()["promises"])
    assert "not known to be batch-invariant: " in promises and "chunk_gated_delta_rule:eager (1)" in promises
    assert "would mix them" in found["packed"].why_not and not found["packed"].same_bits
    assert not found[LAYOUTS[-1]].same_bits


def test_activations_of_own_code_keep_values_gradients_and_what_they_are_given():
    x = torch.randn(3, 37, dtype=torch.float64, requires_grad=True)
    for function in (torch.sigmoid, F.softplus, F.elu):
        (found, wanted) = (
            (y, *torch.autograd.grad(y.square().sum(), x)) for y in (in_whole_vectors(function, x), function(x))
        )
        torch.testing.assert_close(found, wanted)
    given, many = x.detach().clone(), torch.randn(70001)  # of which two threads take a share each
    with _Vectors():
        assert F.elu(given, inplace=True) is given
        for function in (F.silu, F.mish, lambda x: torch.sigmoid(input=x)):
            assert function(many[64:-2]).equal(function(many)[64:-2])


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])  # the latter's module holds a function
def test_an_mlp_that_stays_the_models_own_has_the_same_bits_too(activation):
    model = build("llama", hidden_act=activation)
    with bind(model, {**SAME, "swiglu_mlp_implementation": "eager"}, device="cpu"):
        assert [each for each in check_parity(model) if not each.same_bits] == []


@pytest.mark.thorough
def test_a_compiled_hybrid_has_the_same_bits_with_graphs_that_end_at_its_gates():
    model, ids = made("qwen3_next"), torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(3))
    with bind(model, SAME, device="cpu"):
        wanted = model(input_ids=ids, use_cache=False).logits
        assert torch.compile(model, backend="eager")(input_ids=ids, use_cache=False).logits.equal(wanted)


def plant(product, monkeypatch):
    """In ``linear`` alone: modules that import the product keep their own, if they are imported before."""
    for name in ("cross_entropy_loss", "grouped_products", "token_logprobs"):
        importlib.import_module(f"veomni_torch.{name}")
    monkeypatch.setattr(fixed_order, "linear", product)


def splits_by_the_batch(rows, weight, bias=None):
    """Sums in two halves where there are many rows."""
    half = rows.shape[1] // 2 if len(rows) > 100 else 0
    return F.linear(rows[:, half:], weight[:, half:], bias) + rows[:, :half] @ weight[:, :half].t()


_CALLS = itertools.count()


def adds_in_any_order(rows, weight, bias=None):
    """As atomic additions do: each call begins elsewhere."""
    first = next(_CALLS) % rows.shape[1]
    return F.linear(rows.roll(first, 1), weight.roll(first, 1), bias)


@pytest.mark.parametrize("breaker", [splits_by_the_batch, adds_in_any_order])
def test_a_split_by_the_batch_and_atomic_sums_are_named_where_they_happen(breaker, monkeypatch):
    plant(breaker, monkeypatch)
    model = made("qwen3_moe")
    with bind(model, {**SAME, "moe_implementation": "eager"}, device="cpu"):
        found = {each.layout: each for each in check_parity(model)}
    named = "model.layers.0.self_attn.q_proj (Linear, linear:fixed_order)"
    assert found["each sequence alone"].first == found[LAYOUTS[-1]].first == named


@pytest.mark.parametrize("device", DEVICES)
def test_a_tie_that_a_router_breaks_by_the_tokens_place_is_named_there(device, monkeypatch):
    """Its proof draws numbers without ties. Tied experts have equal weights, so that nothing but the choice differs."""
    own = modeling_qwen3_moe.Qwen3MoeTopKRouter.forward

    def forward(self, hidden_states):
        logits, weights, _ = own(self, hidden_states)
        odd = torch.arange(len(logits), device=logits.device)[:, None] % 2
        later = torch.arange(self.num_experts, device=logits.device)
        return logits, weights, (logits.double() + odd * later * 1e-12).topk(self.top_k).indices

    def first_differences(scale):
        model = made("qwen3_moe").to(device)
        with bind(model, ON[device], device=device), torch.no_grad():
            for layer in model.model.layers:
                layer.mlp.gate.weight.mul_(scale)
            return {each.layout: each.first for each in check_parity(model)}

    assert set(first_differences(scale=0.0).values()) == {""}
    monkeypatch.setattr(modeling_qwen3_moe.Qwen3MoeTopKRouter, "forward", forward)
    assert set(first_differences(scale=1.0).values()) == {""}
    found = first_differences(scale=0.0)
    assert found["padded on the left"] == found[LAYOUTS[-1]]
    assert found[LAYOUTS[-1]].startswith("model.layers.0.mlp.gate (Qwen3MoeTopKRouter")
    assert not found["in a batch of 21"]  # of a token's places there, each is as odd as in the batch of three


def test_a_split_of_one_row_alone_is_named_where_one_sequence_is_decoded(monkeypatch):
    own = fixed_order.linear

    def linear(rows, *rest):
        return splits_by_the_batch(rows.repeat(101, 1), *rest)[:1] if len(rows) == 1 else own(rows, *rest)

    plant(linear, monkeypatch)
    model = made("llama")
    with bind(model, SAME, device="cpu"):
        *others, alone = check_parity(model)
    assert all(each.same_bits for each in others)
    assert alone.first == "model.layers.0.self_attn.q_proj (Linear, linear:fixed_order)"


def test_blocks_of_keys_that_depend_on_their_number_are_seen(monkeypatch):
    """As where one query's keys are shared by programs, past what one of them takes."""
    own = attention_in_fixed_order.attention

    def attention(module, query, key, *rest, **options):
        is_long = query.shape[2] == 1 and key.shape[2] > 64
        monkeypatch.setattr(attention_in_fixed_order, "_KEYS", 32 if is_long else keys)
        return own(module, query, key, *rest, **options)

    keys = attention_in_fixed_order._KEYS
    monkeypatch.setattr(attention_in_fixed_order, "attention", attention)
    model = build("llama", initializer_range=0.2)
    with bind(model, SAME, device="cpu"):
        *others, decoded, alone = check_parity(model)
    assert all(each.same_bits for each in others)
    named = "model.layers.0.self_attn (LlamaAttention, attention:fixed_order, rotary_pos_emb:eager), before its o_proj"
    assert decoded.first == alone.first == named  # and not the product after it, which is given other bits


def adds_up_as_suits_the_batch(x, dim):
    return x.sum(dim, keepdim=True) if x.shape[0] > 3 else x.flip(dim).cumsum(dim).narrow(dim, -1, 1)


def test_a_state_whose_sums_depend_on_the_batch_is_named_by_its_layer(monkeypatch):
    monkeypatch.setattr("veomni_torch.delta_rule_in_fixed_order.sum_of_halves", adds_up_as_suits_the_batch)
    model = made("qwen3_next")
    with bind(model, SAME, device="cpu"):
        found = {each.layout: each for each in check_parity(model)}
    assert found["each sequence alone"].same_bits  # the sums of three rows are those of one
    assert found["in a batch of 21"].first.startswith("model.layers.0.linear_attn (Qwen3NextGatedDeltaNet, ")


@pytest.mark.parametrize(
    "name", ["torch_recurrent_gated_delta_rule", pytest.param("causal_conv1d_update", marks=pytest.mark.thorough)]
)
def test_a_step_of_single_tokens_that_is_not_proven_stays_and_is_named(name, monkeypatch):
    own = inspect.unwrap(getattr(modeling_qwen3_next, name))

    def doubled(*args, **kwargs):
        result = own(*args, **kwargs)
        return (2 * result[0], result[1]) if isinstance(result, tuple) else 2 * result

    monkeypatch.setattr(modeling_qwen3_next, name, doubled)
    model = made("qwen3_next")
    with bind(model, SAME, device="cpu"):
        *others, decoded, alone = check_parity(model)
    assert all(each.same_bits for each in others)
    for each in (decoded, alone):
        assert each.largest > 0 and each.first.startswith("model.layers.0.linear_attn (")


JOB = """model:
  config: {model_type: llama, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 1, num_attention_heads: 4}
  dtype: float32
  ops_implementation:
    preset: auto
    require: batch_invariant
    linear_implementation: fixed_order
    token_logprobs_implementation: fixed_order
"""


def test_the_command_says_what_holds_and_exits_with_one_where_a_required_promise_does_not(tmp_path, monkeypatch):
    job = tmp_path / "job.yaml"
    job.write_text(JOB)
    run = CliRunner().invoke(build_app(), ["parity", str(job)])
    assert run.exit_code == 0 and "This model's forward is batch-invariant here; the job requires it" in run.output
    plant(splits_by_the_batch, monkeypatch)
    run = CliRunner().invoke(build_app(), ["parity", str(job), "--json"])
    assert (
        run.exit_code == 1 and '"first": "model.layers.0.self_attn.q_proj (Linear, linear:fixed_order)"' in run.output
    )
