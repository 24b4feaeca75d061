"""``kda``: where it is found, that bound models compute the same, and what its contract catches."""

from __future__ import annotations

import copy
import importlib
import inspect
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText
from transformers.integrations import hub_kernels

from counting_kernels import calls, counting_registry
from models import step, tokens
from planted_faults import assert_caught
from test_chunk_gated_delta_rule import WrongGradient, off_by
from tiny_models import tiny_model
from veomni_core import bind, find_sites
from veomni_core.errors import PackedSequencesError
from veomni_core.ops.kda import check_call, standard

OP = "kda"
FIELD = f"{OP}_implementation"
ALONE = {"preset": "eager", FIELD: "chunked_kda"}
ROUTED = ("kimi_linear", "bailing_hybrid", "glm5_next")
FAMILIES = tuple(name for name in ROUTED if name in CONFIG_MAPPING)
pytestmark = pytest.mark.skipif(not FAMILIES, reason="this transformers has no model with Kimi delta attention")
GLM = {
    "text_config": {
        **{"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32},
        **{"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 32},
        **{"q_lora_rank": 32, "v_head_dim": 16, "qk_nope_head_dim": 16, "n_routed_experts": 4},
        **{"num_experts_per_tok": 2, "index_topk": 64, "index_head_dim": 16, "index_n_heads": 2, "index_kpool": 4},
        **{"linear_head_dim": 16, "linear_num_heads": 4, "pad_token_id": 0, "hc_mult": 2},
    },
    "vision_config": {
        **{"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64, "intermediate_size": 32},
        "projection_intermediate_size": 32,
    },
}


def family(name, dtype=torch.float32):
    if name != "glm5_next":
        return tiny_model(name, dtype)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(CONFIG_MAPPING[name](**GLM), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.1 if parameter.dim() < 2 else 0.5 * parameter.shape[-1] ** -0.5
            parameter.add_(torch.randn_like(parameter), alpha=spread)
    return model.to(dtype).train()


def modeling(name):
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def own(name="kimi_linear"):
    """transformers' function in plain PyTorch."""
    return inspect.unwrap(modeling(name).chunk_kimi_delta_attention)


def kda_sites(model):
    return [site for site in find_sites(model) if site.op_name == OP]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_bound_model_equals_its_own_code(name):
    model, ids = family(name), tokens(2, 70)
    loss, gradients = step(model, ids)
    with bind(model, ALONE, verify=name == "kimi_linear") as binding:
        assert [str(planned.spec) for planned in binding.plan.kernels] == [f"{OP}/standard:chunked_kda"]
        bound_loss, bound_gradients = step(model, ids)
        assert not binding.receipt.changed
    torch.testing.assert_close(bound_loss, loss, rtol=1e-5, atol=0)
    assert off_by(bound_gradients, gradients) <= 1e-5
    assert torch.equal(step(model, ids)[0], loss)  # its own code again


@pytest.mark.parametrize("name", FAMILIES)
def test_in_bfloat16_it_is_as_accurate_as_its_own_code(name):
    """Both beside float32: where rounding sends a token to another expert, two right runs differ too."""
    model, ids = family(name, torch.bfloat16), tokens(2, 70)
    exact = step(copy.deepcopy(model).float(), ids)
    wanted = step(model, ids)
    with bind(model, ALONE):
        found = step(model, ids)
    assert off_by(found[1], exact[1]) <= 1.5 * off_by(wanted[1], exact[1]) + 5e-3
    assert abs(float(found[0] - exact[0])) <= 2.0 * abs(float(wanted[0] - exact[0])) + 1e-2


@pytest.mark.parametrize("name", FAMILIES)
def test_every_linear_layer_calls_the_kernel_once(name):
    model = family(name)
    sites = kda_sites(model)
    assert sites and {(site.variant, site.own) for site in sites} == {("standard", "eager")}
    assert {tuple(site.sizes.items()) for site in sites} == {
        (("key_heads", (4,)), ("value_heads", (4,)), ("key_width", (16,)), ("value_width", (16,)))
    }
    calls.clear()
    with bind(model, {"preset": "eager", FIELD: "one"}, registry=counting_registry("one", ops=(OP,))):
        step(model)
    assert calls[(OP, "standard", "one")] == len(sites)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_prompt_in_parts_and_decoding_give_what_its_own_code_gives(name):
    """The second part starts from the first's states; single tokens go through the model's recurrent function."""
    model, ids = family(name).eval(), tokens(2, 30)

    def logits():
        found, cache = [], None
        for part in (ids[:, :13], ids[:, 13:27], ids[:, 27:28], ids[:, 28:29]):
            out = model(part, past_key_values=cache, use_cache=True)
            found.append(out.logits)
            cache = out.past_key_values
        return torch.cat(found, dim=1)

    with torch.no_grad():
        wanted = logits()
        with bind(model, ALONE):
            torch.testing.assert_close(logits(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_reference_equals_transformers_own_code(name):
    torch.manual_seed(0)
    inputs = [torch.randn(2, 70, 3, width) for width in (8, 8, 6)]
    inputs += [-torch.rand(2, 70, 3, 8), torch.rand(2, 70, 3)]
    options = {"initial_state": torch.randn(2, 3, 8, 6), "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    found = standard(*inputs, **options)
    torch.testing.assert_close(found, own(name)(*inputs, **options), rtol=1e-4, atol=1e-5)


BOUNDS = ((0, 1), (1, 10), (10, 40))
ENDS = torch.tensor([0, 1, 10, 40], dtype=torch.int32)
POSITIONS = torch.cat([torch.arange(last - first) for first, last in BOUNDS]).unsqueeze(0)
NUMBERS = torch.tensor([0] + [1] * 9 + [2] * 30, dtype=torch.int32).unsqueeze(0)
WAYS = {
    "positions": {"position_ids": POSITIONS},
    "cu_seq_lens_q": {"position_ids": POSITIONS, "cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS},
    "seq_idx": {"position_ids": POSITIONS, "seq_idx": NUMBERS},
}


@pytest.mark.parametrize("way", WAYS)
def test_packed_sequences_give_what_they_give_alone(way):
    model, ids = family("kimi_linear"), tokens(1, 40)
    with bind(model, {**ALONE, "causal_conv1d_implementation": "auto"}):
        together = model(ids, **WAYS[way], use_cache=False).logits
    with torch.no_grad():
        alone = torch.cat([model(ids[:, first:last], use_cache=False).logits for first, last in BOUNDS], dim=1)
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_a_layer_that_stays_eager_refuses_packed_sequences(way):
    model = family("kimi_linear")
    words = r"model\.layers\.0\.self_attn \(KimiLinearDeltaAttention\) would mix them: its kda stays eager"
    with bind(model, {"preset": "eager", "causal_conv1d_implementation": "auto"}):
        with pytest.raises(PackedSequencesError, match=words):
            model(tokens(1, 40), **WAYS[way])
        model(tokens(1, 40), use_cache=False)


@pytest.mark.skipif("glm5_next" not in FAMILIES, reason="this transformers has no GLM-5-Next")
@pytest.mark.parametrize("way", WAYS)
def test_attention_that_chooses_keys_by_padding_alone_refuses_packed_sequences(way):
    """GLM-5-Next's indexer pools neighbouring keys from the row's first token on, whatever kernel the layers have."""
    model, ids = family("glm5_next"), tokens(1, 40)
    wanted = model(ids, use_cache=False).logits
    words = r"model\.language_model \(Glm5NextTextModel\) would mix them: the masks that it gives to its attention say"
    with bind(model, {**ALONE, "causal_conv1d_implementation": "auto"}):
        with pytest.raises(PackedSequencesError, match=words):
            model(ids, **WAYS[way])
        torch.testing.assert_close(model(ids, use_cache=False).logits, wanted, rtol=1e-4, atol=1e-5)


@pytest.fixture
def a_package(monkeypatch):
    """transformers has found a package with ``chunk_kda``; its function can't run here."""

    def chunk_kda(q, k, v, g, beta, cu_seqlens=None, **kwargs):
        raise AssertionError("the package's function ran")

    package = ModuleType("acme_fla")
    package.ops = SimpleNamespace(kda=SimpleNamespace(chunk_kda=chunk_kda))
    monkeypatch.setitem(sys.modules, "acme_fla", package)
    chunk_kda.__module__ = "acme_fla.ops.kda"
    decorated = hub_kernels.use_kernel_func_from_hub_with_fallback("chunk_kda", "acme_fla")(own())
    monkeypatch.setattr(modeling("kimi_linear"), "chunk_kimi_delta_attention", decorated)


@pytest.mark.usefixtures("a_package")
def test_the_receipt_says_what_the_model_would_have_run():
    model = family("kimi_linear")
    with pytest.raises(AssertionError, match="the package's function ran"):
        model(tokens())
    [site, *_] = kda_sites(model)
    assert (site.variant, site.own) == ("standard", "acme_fla.ops.kda.chunk_kda")
    assert site.evidence.endswith("in its place the model would run acme_fla.ops.kda.chunk_kda")
    with bind(model, ALONE):
        model(tokens())
    with bind(model, {"preset": "eager", FIELD: "auto"}) as binding:
        [op] = [each for each in binding.plan.ops if each.op_name == OP]
        assert {site.spec for site in op.sites} == {None}  # plain PyTorch would be slower than the package


@pytest.mark.usefixtures("a_package")
def test_a_packages_function_is_not_told_of_boundaries():
    """The layer passes on ``cu_seq_lens_q``, of which ``chunk_kda`` knows nothing: its argument is ``cu_seqlens``."""
    model = family("kimi_linear")
    bind(model, {"preset": "eager", "causal_conv1d_implementation": "auto"})
    words = r"its kda stays acme_fla\.ops\.kda\.chunk_kda, to which the layer doesn't pass cu_seqlens"
    with pytest.raises(PackedSequencesError, match=words):
        model(tokens(1, 40), position_ids=POSITIONS)


class Mixer(nn.Module):
    """A layer that calls a global, as transformers' do."""

    num_heads, head_dim = 2, 8

    def __init__(self):
        super().__init__()
        self.in_proj = nn.Linear(16, 2 * 8 * 4)
        self.b_proj = nn.Linear(16, 2)

    def forward(self, x):
        q, k, v, g = self.in_proj(x).unflatten(-1, (4, 2, 8)).unbind(2)
        beta = self.b_proj(x).sigmoid()
        return chunk_kda(q, k, v, g=-F.softplus(g), beta=beta, use_qk_l2norm_in_kernel=True)[0]


def chunk_kda(query, key, value, g, beta, **kwargs):
    arguments = _spoiled(query=query, key=key, value=value, g=g, beta=beta)
    return _own(**arguments, **kwargs)


_own = own() if FAMILIES else None
_spoiled = dict


def test_what_spoils_nothing_is_bound():
    torch.manual_seed(0)
    model, x = nn.Sequential(Mixer()), torch.randn(2, 9, 16)
    [site] = kda_sites(model)
    assert (site.variant, dict(site.detail)) == ("standard", {"function": "chunk_kda"})
    wanted = model(x)
    with bind(model, ALONE):
        torch.testing.assert_close(model(x), wanted, rtol=1e-4, atol=1e-5)


def _for_long_sequences(g, **others):
    return {"g": g.clamp(min=-1.0) if g.shape[1] > 1000 else g, **others}


LOOKALIKES = {
    "no decay": (lambda g, **others: {"g": torch.zeros_like(g), **others}, "no variant fits"),
    "one decay for all channels": (
        lambda g, **others: {"g": g.mean(-1, keepdim=True).expand_as(g), **others},
        "no variant fits",
    ),
    "a bounded decay": (lambda g, **others: {"g": g.clamp(min=-2.0), **others}, "no variant fits"),
    "values that count once more": (lambda value, **others: {"value": 1.01 * value, **others}, "no variant fits"),
    "no gradient of g": (lambda g, **others: {"g": g.detach(), **others}, "no variant fits"),
    "another rule for long sequences": (_for_long_sequences, "_for_long_sequences chooses by shape"),
}


@pytest.mark.parametrize("name", LOOKALIKES)
def test_a_function_of_this_name_that_computes_something_else_stays_eager(name, monkeypatch):
    spoil, words = LOOKALIKES[name]
    monkeypatch.setitem(globals(), "_spoiled", spoil)
    [site] = kda_sites(nn.Sequential(Mixer()))
    assert site.variant is None and words in site.evidence


def gradient_of_g_is_off(query, key, value, g, beta, **options):
    return standard(query, key, value, WrongGradient.apply(g, 1.03), beta, **options)


def gradient_of_beta_is_off(query, key, value, g, beta, **options):
    return standard(query, key, value, g, WrongGradient.apply(beta, 0.97), **options)


def state_is_carried_over(*args, cu_seqlens=None, initial_state=None, output_final_state=False, **options):
    """Each packed sequence begins with what the one before it left."""
    if cu_seqlens is None:
        return standard(*args, initial_state=initial_state, output_final_state=output_final_state, **options)
    outputs, finals = [], []
    for index, (first, last) in enumerate(check_call(*args, initial_state, cu_seqlens)):
        begun = 0 if initial_state is None else initial_state[index : index + 1]
        state = begun + (finals[-1] if finals else torch.zeros(()))
        pieces = [x[:, first:last] for x in args]
        state = state.expand(1, args[2].shape[2], args[0].shape[3], args[2].shape[3])
        output, final = standard(*pieces, initial_state=state, output_final_state=True, **options)
        outputs.append(output)
        finals.append(final)
    return torch.cat(outputs, dim=1), torch.cat(finals) if output_final_state else None


def decay_is_ignored(query, key, value, g, beta, **options):
    return standard(query, key, value, 0.0 * g, beta, **options)


def decay_is_that_of_the_head(query, key, value, g, beta, **options):
    """As the gated delta rule has it."""
    return standard(query, key, value, g.mean(-1, keepdim=True).expand_as(g), beta, **options)


def cumulated_decays_overflow(query, key, value, g, beta, **options):
    """As a kernel that divides by the cumulated decay: infinite where much is forgotten."""
    lost = (-g.cumsum(1)).exp()
    return standard(query, key, value * (lost / lost).mean(-1, keepdim=True).to(value.dtype), g, beta, **options)


def differences_of_cumulated_decays(query, key, value, g, beta, **options):
    """What comes after a large decay has lost its own."""
    cumulated = g.cumsum(1)
    return standard(query, key, value, F.pad(cumulated.diff(dim=1), (0, 0, 0, 0, 1, 0)), beta, **options)


FAULTS = {
    gradient_of_g_is_off: "gradient of g",
    gradient_of_beta_is_off: "gradient of beta",
    state_is_carried_over: "packed",
    decay_is_ignored: "off",
    decay_is_that_of_the_head: "off",
    cumulated_decays_overflow: "large decay",
    differences_of_cumulated_decays: "forget",
}


@pytest.mark.parametrize("kernel", FAULTS, ids=lambda kernel: kernel.__name__)
def test_the_contract_catches(kernel):
    assert_caught(kernel, FAULTS[kernel], op=OP)


Q, V, G, BETA = torch.zeros(1, 7, 2, 8), torch.zeros(1, 7, 4, 6), torch.zeros(1, 7, 4, 8), torch.zeros(1, 7, 4)
MISTAKES = {
    "g has one number per head": ({"g": BETA}, "g is (1, 7, 4), expected (1, 7, 4, 8): one number per token, head and"),
    "g has the key heads": ({"g": G[:, :, :2]}, "g is (1, 7, 2, 8), expected (1, 7, 4, 8)"),
    "beta per channel": ({"beta": G}, "beta is (1, 7, 4, 8), expected (1, 7, 4): one number per token and head"),
    "value has another length": ({"value": V[:, 1:]}, "expected [B, S, H, K] twice"),
    "a state of another batch": ({"initial_state": torch.zeros(2, 4, 8, 6)}, "expected (1, 4, 8, 6)"),
    "boundaries that don't add up": ({"cu_seqlens": torch.tensor([0, 3, 6])}, "from 0 to 6, expected from 0 to 7"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_call_that_does_not_fit_is_refused(name):
    wrong, words = MISTAKES[name]
    with pytest.raises(ValueError) as error:
        standard(**{"query": Q, "key": Q, "value": V, "g": G, "beta": BETA, **wrong})
    assert words in str(error.value)
