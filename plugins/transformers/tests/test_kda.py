"""``kda``: where it is found, that bound models compute the same, and what refuses packed sequences."""

from __future__ import annotations

import copy
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from transformers.integrations import hub_kernels

from counting_kernels import calls, counting_registry
from kda_models import ALONE, FAMILIES, FIELD, OP, family, kda_sites, modeling, needs_kda, own
from models import off_by, step, tokens
from veomni_core import bind
from veomni_core.errors import PackedSequencesError

pytestmark = needs_kda


@pytest.mark.thorough
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


@pytest.mark.thorough
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


@pytest.mark.thorough
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


@pytest.mark.thorough(one_per=[])
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


BOUNDS = ((0, 1), (1, 10), (10, 40))
ENDS = torch.tensor([0, 1, 10, 40], dtype=torch.int32)
POSITIONS = torch.cat([torch.arange(last - first) for first, last in BOUNDS]).unsqueeze(0)
NUMBERS = torch.tensor([0] + [1] * 9 + [2] * 30, dtype=torch.int32).unsqueeze(0)
WAYS = {
    "positions": {"position_ids": POSITIONS},
    "cu_seq_lens_q": {"position_ids": POSITIONS, "cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS},
    "seq_idx": {"position_ids": POSITIONS, "seq_idx": NUMBERS},
}


@pytest.mark.thorough
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
