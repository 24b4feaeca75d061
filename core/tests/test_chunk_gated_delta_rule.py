"""``chunk_gated_delta_rule``: where it is found, that bound models compute the same, and what its contract catches."""

from __future__ import annotations

import inspect
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback
from transformers.models.olmo_hybrid import modeling_olmo_hybrid
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next

from counting_kernels import calls, counting_registry
from models import build, step, tokens
from planted_faults import assert_caught
from veomni_core import bind, find_sites
from veomni_core.ops.chunk_gated_delta_rule import check_call, standard
from veomni_core.sites.forwards.delta_rule_call import delta_rule_call

OP = "chunk_gated_delta_rule"
ALONE = {"preset": "eager", f"{OP}_implementation": "chunked_delta"}
LINEAR = {
    "num_hidden_layers": 4,  # the fourth has full attention
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
FAMILIES = {
    "qwen3_next": {**LINEAR, **EXPERTS},
    "qwen3_5_text": LINEAR,
    "qwen3_5_moe_text": {**LINEAR, **EXPERTS},
    "olmo_hybrid": LINEAR,
}
FILES = (modeling_qwen3_next, modeling_qwen3_5, modeling_qwen3_5_moe, modeling_olmo_hybrid)


def family(name, **options):
    return build(name, **{**FAMILIES[name], **options})


def delta_sites(model):
    return [site for site in find_sites(model) if site.op_name == OP]


def off_by(found, wanted):
    """The difference of all gradients, as a share of their norm."""
    assert found.keys() == wanted.keys()
    difference = torch.stack([(found[name] - each).float().norm() for name, each in wanted.items()]).norm()
    return float(difference / torch.stack([each.float().norm() for each in wanted.values()]).norm())


@pytest.mark.parametrize("dtype, allowed", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_bound_model_equals_its_own_code(name, dtype, allowed):
    model, ids = family(name, dtype=dtype), tokens(2, 70)
    loss, gradients = step(model, ids)
    with bind(model, ALONE, verify=name == "qwen3_next") as binding:
        assert [str(planned.spec) for planned in binding.plan.kernels] == [f"{OP}/standard:chunked_delta"]
        bound_loss, bound_gradients = step(model, ids)
        assert not binding.receipt.changed
    torch.testing.assert_close(bound_loss, loss, rtol=allowed, atol=0)
    assert off_by(bound_gradients, gradients) <= allowed
    assert torch.equal(step(model, ids)[0], loss)  # its own code again


@pytest.mark.parametrize("name", FAMILIES)
def test_every_linear_layer_calls_the_kernel_once(name):
    model = family(name)
    sites = delta_sites(model)
    assert [(site.variant, site.own, site.sizes["value_width"]) for site in sites] == [("standard", "eager", (12,))] * 3
    calls.clear()
    with bind(model, {"preset": "eager", f"{OP}_implementation": "one"}, registry=counting_registry("one", ops=(OP,))):
        step(model)
    assert calls[(OP, "standard", "one")] == 3


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


def test_packed_sequences_give_what_they_give_alone():
    bounds = ((0, 1), (1, 10), (10, 80))
    model, ids = family("qwen3_next"), tokens(1, 80)
    ends = torch.tensor([0, 1, 10, 80], dtype=torch.int32)
    positions = torch.cat([torch.arange(last - first) for first, last in bounds]).unsqueeze(0)
    packed = {"position_ids": positions, "cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "use_cache": False}
    with pytest.raises(ValueError, match="can't keep packed sequences apart"):
        model(ids, **packed)
    with bind(model, {**ALONE, "causal_conv1d_implementation": "auto"}):
        together = model(ids, **packed).logits
    with torch.no_grad():
        alone = torch.cat([model(ids[:, first:last], use_cache=False).logits for first, last in bounds], dim=1)
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


def test_what_a_layer_is_not_told_of_packing_is_refused():
    model = family("qwen3_next")
    numbers, rows = torch.tensor([[0] * 4 + [1] * 5]), torch.tensor([0, 4, 9, 18])
    with bind(model, {**ALONE, "causal_conv1d_implementation": "auto"}):
        layer = model.model.layers[0].linear_attn
        with pytest.raises(ValueError, match="seq_idx without cu_seq_lens_q"):
            layer(torch.zeros(1, 9, 32), seq_idx=numbers)
    call = delta_rule_call(standard)
    inputs = [torch.zeros(2, 9, 4, 8), torch.zeros(2, 9, 4, 8), torch.zeros(2, 9, 4, 6), *torch.zeros(2, 2, 9, 4)]
    with pytest.raises(ValueError, match="2 rows of packed sequences with states"):
        call(*inputs, output_final_state=True, cu_seqlens_of_rows=rows)


@pytest.mark.parametrize("modeling", FILES, ids=lambda module: module.__name__.rsplit(".", 1)[-1])
def test_the_reference_equals_transformers_own_code(modeling):
    torch.manual_seed(0)
    inputs = [torch.randn(2, 70, heads, width) for heads, width in ((2, 8), (2, 8), (4, 6))]
    inputs += [-torch.rand(2, 70, 4), torch.rand(2, 70, 4)]
    options = {"initial_state": torch.randn(2, 4, 8, 6), "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    found = standard(*inputs, **options)
    torch.testing.assert_close(found, modeling.torch_chunk_gated_delta_rule(*inputs, **options), rtol=1e-4, atol=1e-5)


def test_the_receipt_says_what_the_model_would_have_run(monkeypatch):
    """Where transformers found a package, its function is not the one that is proven, and doesn't run once bound."""

    def chunk_gated_delta_rule(q, k, v, g, beta, **kwargs):
        raise AssertionError("the package's function ran")

    package = ModuleType("acme_fla")
    package.ops = SimpleNamespace(gated_delta_rule=SimpleNamespace(chunk_gated_delta_rule=chunk_gated_delta_rule))
    monkeypatch.setitem(sys.modules, "acme_fla", package)
    chunk_gated_delta_rule.__module__ = "acme_fla.ops.gated_delta_rule"
    own = inspect.unwrap(modeling_qwen3_next.torch_chunk_gated_delta_rule)
    decorated = use_kernel_func_from_hub_with_fallback(OP, "acme_fla")(own)
    monkeypatch.setattr(modeling_qwen3_next, "torch_chunk_gated_delta_rule", decorated)
    model = family("qwen3_next")
    with pytest.raises(AssertionError, match="the package's function ran"):
        model(tokens())
    name = "acme_fla.ops.gated_delta_rule.chunk_gated_delta_rule"
    [site, *_] = delta_sites(model)
    assert (site.variant, site.own) == ("standard", name)
    assert site.evidence.endswith(f"in its place the model would run {name}")
    with bind(model, ALONE):
        model(tokens())
    # Plain PyTorch stands in for a package's function only where it is named; any other kernel by its preference too.
    field = f"{OP}_implementation"
    with bind(model, {"preset": "eager", field: "auto"}) as binding:
        [op] = [each for each in binding.plan.ops if each.op_name == OP]
        assert {site.spec for site in op.sites} == {None}
        assert {site.reason for site in op.sites} == {
            f"the model runs {name}, and chunked_delta is plain PyTorch: name it to have it"
        }
    with bind(model, {"preset": "eager", field: "auto"}, registry=counting_registry("fast")) as binding:
        [op] = [each for each in binding.plan.ops if each.op_name == OP]
        assert {site.kernel for site in op.sites} == {"fast"}


def test_a_function_that_kernels_made_a_layer_of_is_bound(monkeypatch):
    """As transformers decorates it where a version of the package ``kernels`` is installed that it takes."""
    kernels = pytest.importorskip("kernels")
    layer = kernels.use_kernel_forward_from_hub(OP)(modeling_qwen3_next.torch_chunk_gated_delta_rule)
    assert isinstance(layer, nn.Module)
    monkeypatch.setattr(modeling_qwen3_next, "torch_chunk_gated_delta_rule", layer)
    model = family("qwen3_next")
    wanted = step(model)
    calls.clear()
    with bind(model, {"preset": "eager", f"{OP}_implementation": "one"}, registry=counting_registry("one", ops=(OP,))):
        assert off_by(step(model)[1], wanted[1]) <= 1e-5
    assert calls[(OP, "standard", "one")] == 3


# What a modeling file of transformers 5.2 has where no package is installed: a global of the attribute's name too.
chunk_gated_delta_rule = None
torch_chunk_gated_delta_rule = inspect.unwrap(modeling_qwen3_next.torch_chunk_gated_delta_rule)


class Mixer(nn.Module):
    """A layer as in transformers 5.2: ``__init__`` sets the function that it calls."""

    def __init__(self, function):
        super().__init__()
        self.in_proj = nn.Linear(16, 2 * 8 * 3)
        self.gates = nn.Linear(16, 4)
        self.chunk_gated_delta_rule = function

    def forward(self, x):
        q, k, v = self.in_proj(x).unflatten(-1, (3, 2, 8)).unbind(2)
        g, beta = self.gates(x).chunk(2, dim=-1)
        return self.chunk_gated_delta_rule(q, k, v, g=-F.softplus(g), beta=beta.sigmoid(), use_qk_l2norm_in_kernel=True)


def test_a_function_that_init_sets_is_bound_on_the_layer():
    torch.manual_seed(0)
    model, x = nn.Sequential(Mixer(modeling_qwen3_next.torch_chunk_gated_delta_rule)), torch.randn(2, 9, 16)
    [site] = delta_sites(model)
    assert (site.variant, dict(site.detail)) == ("standard", {"attribute": OP})
    wanted = model(x)[0]
    calls.clear()
    with bind(model, {"preset": "eager", f"{OP}_implementation": "one"}, registry=counting_registry("one", ops=(OP,))):
        torch.testing.assert_close(model(x)[0], wanted)
    assert calls[(OP, "standard", "one")] == 1
    assert torch.equal(model(x)[0], wanted) and sum(calls.values()) == 1


def test_a_packages_function_that_init_sets_is_bound_where_the_file_has_its_own():
    def packages(*args, **kwargs):
        raise AssertionError

    packages.__module__ = "acme_fla.ops"
    model = nn.Sequential(Mixer(packages))
    [site] = delta_sites(model)
    assert site.variant == "standard" and site.own == "acme_fla.ops.packages"
    with bind(model, ALONE):
        model(torch.randn(1, 5, 16))


def of_own(*, spoil):
    """Transformers' function with its arguments changed by ``spoil``."""

    own = torch_chunk_gated_delta_rule

    def spoiled(query, key, value, g, beta, **kwargs):
        return own(**spoil(query=query, key=key, value=value, g=g, beta=beta), **kwargs)

    return spoiled


def _as_they_are(query, key, value, g, beta):
    return {"query": query, "key": key, "value": value, "g": g, "beta": beta}


def test_what_spoils_nothing_is_bound():
    [site] = delta_sites(nn.Sequential(Mixer(of_own(spoil=_as_they_are))))
    assert site.variant == "standard"


def _a_cap(query, key, value, g, beta):
    if query.shape[1] > 1000:
        g = g.clamp(min=-1.0)
    return _as_they_are(query, key, value, g, beta)


LOOKALIKES = {
    "no decay": (lambda g, **others: {"g": torch.zeros_like(g), **others}, "no variant fits"),
    "a bounded decay": (lambda g, **others: {"g": g.clamp(min=-2.0), **others}, "no variant fits"),
    "keys that count once more": (lambda key, **others: {"key": 1.01 * key, **others}, "no variant fits"),
    "no gradient of beta": (lambda beta, **others: {"beta": beta.detach(), **others}, "no variant fits"),
    "another rule for long sequences": (_a_cap, "_a_cap chooses by shape"),
}


@pytest.mark.parametrize("name", LOOKALIKES)
def test_a_function_of_this_name_that_computes_something_else_stays_eager(name):
    spoil, words = LOOKALIKES[name]
    [site] = delta_sites(nn.Sequential(Mixer(of_own(spoil=spoil))))
    assert site.variant is None and words in site.evidence


def test_a_package_whose_file_has_no_code_of_its_own_stays_eager(monkeypatch):
    def packages(*args, **kwargs):
        raise AssertionError

    packages.__module__ = "acme_fla.ops"
    monkeypatch.delitem(globals(), "torch_chunk_gated_delta_rule")
    [site] = delta_sites(nn.Sequential(Mixer(packages)))
    assert (site.variant, site.examined) == (None, False)
    assert "the model runs acme_fla.ops.packages" in site.evidence


class WrongGradient(torch.autograd.Function):
    """Multiplies one input's gradient."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, upstream):
        return upstream * ctx.factor, None


def gradient_of_g_is_off(query, key, value, g, beta, **options):
    return standard(query, key, value, WrongGradient.apply(g, 1.03), beta, **options)


def gradient_of_the_state_is_off(*args, initial_state=None, **options):
    state = None if initial_state is None else WrongGradient.apply(initial_state, 1.03)
    return standard(*args, initial_state=state, **options)


def no_gradient_through_the_final_state(*args, **options):
    output, final = standard(*args, **options)
    return output, None if final is None else WrongGradient.apply(final, 0.0)


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


def cumulated_decays_overflow(query, key, value, g, beta, **options):
    """As a kernel that divides by the cumulated decay: infinite where much is forgotten."""
    lost = (-g.cumsum(1)).exp()
    return standard(query, key, value * (lost / lost).unsqueeze(-1).to(value.dtype), g, beta, **options)


FAULTS = {
    gradient_of_g_is_off: "gradient of g",
    gradient_of_the_state_is_off: "gradient of initial_state",
    no_gradient_through_the_final_state: "gradient of",
    state_is_carried_over: "packed",
    decay_is_ignored: "off",
    cumulated_decays_overflow: "large decay",
}


@pytest.mark.parametrize("kernel", FAULTS, ids=lambda kernel: kernel.__name__)
def test_the_contract_catches(kernel):
    assert_caught(kernel, FAULTS[kernel], op=OP)


Q, V, G = torch.zeros(1, 7, 2, 8), torch.zeros(1, 7, 4, 6), torch.zeros(1, 7, 4)
MISTAKES = {
    "value has another length": ({"value": V[:, 1:]}, "expected [B, S, H, K] twice"),
    "value heads are no multiple": ({"value": V[:, :, :3], "g": G[:, :, :3], "beta": G[:, :, :3]}, "multiple of the 2"),
    "g has the key heads": ({"g": G[:, :, :2]}, "g is (1, 7, 2), expected (1, 7, 4)"),
    "a state of another batch": ({"initial_state": torch.zeros(2, 4, 8, 6)}, "expected (1, 4, 8, 6)"),
    "boundaries that don't add up": ({"cu_seqlens": torch.tensor([0, 3, 6])}, "from 0 to 6, expected from 0 to 7"),
    "boundaries that go back": ({"cu_seqlens": torch.tensor([0, 5, 3, 7])}, "goes back from 5 to 3"),
    "boundaries in float": ({"cu_seqlens": torch.tensor([0.0, 7.0])}, "expected integers"),
    "packed in a batch": (
        {"query": Q.expand(2, -1, -1, -1), "key": Q.expand(2, -1, -1, -1), "value": V.expand(2, -1, -1, -1),
         "g": G.expand(2, -1, -1), "beta": G.expand(2, -1, -1), "cu_seqlens": torch.tensor([0, 7])},
        "a batch of 2",
    ),
    "a state per row and not per sequence": (
        {"initial_state": torch.zeros(1, 4, 8, 6), "cu_seqlens": torch.tensor([0, 3, 7])},
        "expected (2, 4, 8, 6)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_call_that_does_not_fit_is_refused(name):
    wrong, words = MISTAKES[name]
    with pytest.raises(ValueError) as error:
        standard(**{"query": Q, "key": Q, "value": V, "g": G, "beta": G, **wrong})
    assert words in str(error.value)
