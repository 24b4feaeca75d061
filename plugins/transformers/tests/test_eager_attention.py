"""A model that was loaded with eager attention computes bound what it computed: at padding, and the weights too."""

from __future__ import annotations

import copy
import importlib.util
import pickle

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from models import assert_equal_steps, build, tokens
from planned_norms import registry
from veomni_core import KernelSpec, bind, binding_of, make_plan
from veomni_core.errors import ConfigError, KernelUnavailableError
from veomni_ops.attention import AttentionModule, standard
from veomni_torch.attention import sdpa
from veomni_transformers.attention.kernel_lookup import looks_up
from veomni_transformers.forwards.like_eager import like_eager
from veomni_transformers.forwards.unseen_queries import unseen_queries
from veomni_transformers.proving import hollow_twin

FAMILIES = [
    "llama",
    *(pytest.param(f, marks=pytest.mark.thorough) for f in ("qwen3_moe", "gemma3_text", "phi3", "mistral", "jetmoe")),
]
KERNELS = ["sdpa", "fixed_order"]
EXTRA = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},  # doesn't pass output_attentions on
    "gemma3_text": {"sliding_window": 4},
    "qwen3_moe": {"output_router_logits": False},  # counted without a mask of four dimensions alone
    "mistral": {"sliding_window": 4},
}
ATTENTION = {"preset": "eager", "attn_implementation": "sdpa"}
LOWEST = torch.finfo(torch.float32).min
MASKS = {
    "left": [[0, 0, 0, 0, 1, 1, 1, 1, 1], [1] * 9],
    "right": [[1, 1, 1, 1, 1, 0, 0, 0, 0], [1] * 9],
    "a hole": [[1, 1, 0, 0, 1, 1, 1, 1, 1], [1] * 9],
    "a row that is all padding": [[0] * 9, [1] * 9],
}


def model(family, own="eager"):
    made = build(family, **EXTRA.get(family, {}))
    made.set_attn_implementation(own)
    return made


def step(which, mask, ids=None):
    """All labels count, those at padding too."""
    ids = tokens() if ids is None else ids
    which.zero_grad(set_to_none=True)
    loss = which(input_ids=ids, labels=ids, attention_mask=mask, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in which.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("own", ["eager", "sdpa"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_step_with_padding_is_the_models_own_even_where_padding_counts(family, own, kernel):
    bound, unbound = model(family, own), model(family, own)
    with bind(bound, {**ATTENTION, "attn_implementation": kernel}) as binding:
        assert not any(op.left_out for op in binding.plan.ops)
        for mask in map(torch.tensor, MASKS.values()):
            assert_equal_steps(step(bound, mask), step(unbound, mask))
        one = torch.tensor(MASKS["left"][:1])
        assert_equal_steps(step(bound, one, tokens(1)), step(unbound, one, tokens(1)))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("hidden", [-1e9, -1e30, LOWEST])
def test_masks_of_four_dimensions_are_the_models_own(family, kernel, hidden):
    bound, unbound = model(family), model(family)
    added = torch.zeros(2, 1, 9, 9).masked_fill(~kept_of_two_rows(), hidden)
    with bind(bound, {**ATTENTION, "attn_implementation": kernel}):
        assert_equal_steps(step(bound, added), step(unbound, added))


def kept_of_two_rows():
    return torch.ones(9, 9, dtype=torch.bool).tril() & torch.tensor(MASKS["left"], dtype=torch.bool)[:, None, None]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_masks_of_any_dtype_are_added_as_eager_attention_adds_them(kernel, dtype):
    bound, unbound = model("llama"), model("llama")
    hidden = {torch.int64: -(10**6), torch.float16: -6e4}.get(dtype, -1e9)
    added = torch.zeros(2, 1, 9, 9, dtype=dtype).masked_fill(~kept_of_two_rows(), hidden)
    with bind(bound, {**ATTENTION, "attn_implementation": kernel}):
        for mask in (added, kept_of_two_rows().to(dtype)):
            assert_equal_steps(step(bound, mask), step(unbound, mask))


@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_of_minus_infinity_give_nan(kernel):
    bound, unbound = model("llama"), model("llama")
    added = torch.zeros(2, 1, 9, 9).masked_fill(~kept_of_two_rows(), -torch.inf)
    with bind(bound, {**ATTENTION, "attn_implementation": kernel}):
        for found, wanted in zip(*(step(each, added)[1].values() for each in (bound, unbound)), strict=True):
            assert torch.equal(found.isnan(), wanted.isnan())
        logits = [each(input_ids=tokens(), attention_mask=added).logits for each in (bound, unbound)]
    torch.testing.assert_close(*logits, equal_nan=True)
    assert logits[0].isnan().any() and not logits[0].isnan().all()


def test_a_boolean_mask_of_the_caller_is_added_as_eager_attention_adds_it_or_refused():
    unbound, mask = model("llama"), kept_of_two_rows()
    with bind(bound := model("llama"), {**ATTENTION, "attn_implementation": "fixed_order"}):
        assert_equal_steps(step(bound, mask), step(unbound, mask))
    bound = model("llama")
    with bind(bound, ATTENTION):
        for given in (mask, {"full_attention": mask}):
            with pytest.raises(ConfigError, match="attention_mask is boolean .* adds True as 1 .* Pass numbers to add"):
                step(bound, given)
        with pytest.raises(ConfigError, match="attention_mask is boolean"):
            bound(tokens(), mask)
        padded = {"attention_mask": torch.tensor(MASKS["left"]), "max_new_tokens": 3, "do_sample": False}
        found, wanted = (
            each.eval().generate(tokens(), **padded, cache_implementation="static") for each in (bound, unbound)
        )
        assert torch.equal(found, wanted)
    assert_equal_steps(step(bound.train(), mask), step(unbound.train(), mask))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_gradients_at_queries_that_see_no_key_are_eager_attentions(dtype, biased):
    """Eager attention's own, in float32: the lowest number of the dtype swallows every score."""
    generator = torch.Generator().manual_seed(0)
    module, mask = AttentionModule(2), torch.ones(5, 7, dtype=torch.bool).tril(2).expand(2, 1, 5, 7).clone()
    mask[0, 0, :3] = mask[1, 0, 1] = False
    shapes = ((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8), (1, 4, 5, 7))
    drawn = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    mine, theirs = ([each.clone().to(to).requires_grad_() for each in drawn] for to in (dtype, torch.float32))
    options = [{"scaling": 0.3, **({"position_bias": each[3]} if biased else {})} for each in (mine, theirs)]
    found, _ = like_eager(sdpa, from_the_first_key=True, boolean_masks=True)(module, *mine[:3], mask, **options[0])
    wanted = eager(*theirs[:3], mask, **options[1])
    upstream = torch.randn(wanted.shape, generator=generator)
    leaves = 4 if biased else 3
    gradients = [
        torch.autograd.grad(result, inputs[:leaves], upstream.to(result.dtype))
        for result, inputs in ((found, mine), (wanted, theirs))
    ]
    norm = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    for one, other in zip((found, *gradients[0]), (wanted, *gradients[1]), strict=True):
        assert float((one.float() - other).norm() / other.norm()) < norm


def eager(query, key, value, mask, scaling, position_bias=None):
    key, value = (each.repeat_interleave(2, dim=1) for each in (key, value))
    scores = query @ key.transpose(-1, -2) * scaling
    scores = scores if position_bias is None else scores + position_bias
    added = torch.zeros(mask.shape).masked_fill(~mask, LOWEST)
    return (F.softmax(scores + added, dim=-1) @ value).transpose(1, 2)


def test_the_queries_that_see_no_key_are_found_in_masks_of_padding():
    mask, query = torch.tensor([[0, 0, 1, 1, 0, 0], [0] * 6, [1] * 6]), torch.zeros(3, 4, 6, 8)
    seen_by = {None: [2, 6, 0], 2: [3, 6, 0], 9: [2, 6, 0]}
    for window, counts in seen_by.items():
        assert unseen_queries(mask, query, True, window).sum((1, 2)).tolist() == counts
    assert unseen_queries(mask, query, False, None).sum((1, 2)).tolist() == [0, 6, 0]
    assert unseen_queries(mask, query[:, :, :4], True, None).sum((1, 2)).tolist() == [0, 4, 0]  # the last four
    assert unseen_queries(None, query, True, None) is None


@pytest.mark.parametrize("family", [*FAMILIES, "gpt2"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_attention_weights_are_the_models_own(family, kernel):
    bound, unbound, mask = model(family), model(family), torch.tensor(MASKS["left"])
    with bind(bound, {**ATTENTION, "attn_implementation": kernel}):
        for given in ({}, {"attention_mask": mask}):
            found, wanted = (m.eval()(input_ids=tokens(), output_attentions=True, **given) for m in (bound, unbound))
            assert len(found.attentions) == 2
            torch.testing.assert_close(found.attentions, wanted.attentions)
            torch.testing.assert_close(found.logits, wanted.logits)


def by_lengths(module, query, key, value, attention_mask, **options):
    """The contract's reference, given lengths and padding as a FlashAttention is, and no mask of queries and keys."""
    assert attention_mask is None or attention_mask.dim() == 2
    return standard(module, query, key, value, attention_mask, **options)


FEATURES = ("dense_mask", "padding_mask", "flash_attention_mask")
BY_LENGTHS = registry(KernelSpec("by_lengths", "attention", "standard", f"{__name__}:by_lengths", features=FEATURES))


@pytest.mark.parametrize("family", ["stablelm", "nemotron", "llama"])  # the last hands is_causal to its attention
@pytest.mark.parametrize("kernel", [*KERNELS, "by_lengths"])
def test_a_call_that_is_not_causal_is_the_models_own(family, kernel):
    bound, unbound, ids = model(family), model(family), tokens()
    whole, padded = torch.ones_like(ids), torch.tensor(MASKS["right"])
    labels = torch.where(padded.bool(), ids, -100)  # kernels by lengths give zeros at padding
    by_default = unbound(input_ids=ids, labels=labels).loss

    def step(which, mask):
        which.zero_grad(set_to_none=True)
        loss = which(input_ids=ids, labels=labels, attention_mask=mask, use_cache=False, is_causal=False).loss
        loss.backward()
        return loss.detach(), {name: p.grad.clone() for name, p in which.named_parameters() if p.grad is not None}

    found_in = BY_LENGTHS if kernel == "by_lengths" else None
    with bind(bound, {**ATTENTION, "attn_implementation": kernel}, registry=found_in):
        for checkpointing in (False, True):  # layers run again when the config has lost is_causal
            for mask in (None, whole, padded):
                found, wanted = step(bound, mask), step(unbound, mask)
                assert_equal_steps(found, wanted)
                assert abs(found[0] - by_default) > 1e-4
            for each in (bound, unbound) if not checkpointing else ():
                each.gradient_checkpointing_enable()
        torch.testing.assert_close(bound(input_ids=ids, labels=labels).loss, by_default)  # causal again


def test_masks_of_chunks_are_causal_whatever_the_call_says():
    bound, unbound = (build("llama4_text", attn_implementation="eager", attention_chunk_size=64) for _ in range(2))
    with bind(bound, ATTENTION):
        found, wanted = (each(input_ids=tokens(), is_causal=False).logits for each in (bound, unbound))
    torch.testing.assert_close(found, wanted)


def test_what_proofs_keep_is_real_where_the_first_bind_is_under_fake_tensors():
    spec = importlib.util.spec_from_file_location("hollow_twin_again", hollow_twin.__file__)
    again = importlib.util.module_from_spec(spec)
    with FakeTensorMode():
        spec.loader.exec_module(again)
    assert type(again.ZERO) is type(again._POSITIONS) is torch.Tensor


def test_a_model_without_eager_attention_refuses_to_give_weights():
    bound = model("llama", "sdpa")
    with bind(bound, ATTENTION), pytest.raises(ConfigError, match="sdpa gives no attention weights; choose eager"):
        bound(input_ids=tokens(), output_attentions=True)


def test_a_config_that_wants_weights_in_every_call_keeps_eager_attention():
    wants = build("llama", output_attentions=True, attn_implementation="eager")
    with pytest.raises(KernelUnavailableError, match="does not compute attention_weights, which this site needs"):
        bind(wants, ATTENTION)
    with bind(wants, {"preset": "eager", "attn_implementation": "auto"}) as binding:
        assert [op.chosen for op in binding.plan.ops if op.op_name == "attention"] == [("eager",)]
        assert len(wants(input_ids=tokens()).attentions) == 2


@pytest.mark.parametrize("family", FAMILIES)
def test_its_config_leaves_as_eager_and_takes_the_users_choice(family):
    mask = torch.tensor(MASKS["left"])
    bound, unbound = model(family), model(family)
    with bind(bound, ATTENTION) as binding:
        for config in (copy.deepcopy(bound.config), pickle.loads(pickle.dumps(bound.config)), bound.config):
            built = type(unbound)._from_config(config)
            assert built.config._attn_implementation == "eager"
        for each in (bound, unbound):
            each.set_attn_implementation("sdpa")
        assert_equal_steps(step(bound, mask), step(unbound, mask))
        assert "its attention was set to sdpa" in str(binding.receipt.changed)
    assert bound.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("own", ["eager", "sdpa"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_attention_that_was_put_in_after_bind_is_in_the_receipt(family, own, wrapped):
    """It gets the masks that the kernel takes: none, where eager attention needs one."""
    bound = model(family, own)
    path = next(path for path, module in bound.named_modules() if looks_up(module))
    with bind(bound, ATTENTION):
        twin = copy.deepcopy(bound)
        for each in (twin, bound):
            assert not binding_of(each).receipt.changed
            owner, _, name = path.rpartition(".")
            other, inner = model(family, own).get_submodule(path), ".inner" * wrapped
            setattr(each.get_submodule(owner), name, nn.ModuleDict({"inner": other}) if wrapped else other)
            changed = binding_of(each).receipt.changed
            assert f"{path}{inner} runs attention of its own" in str(changed)
            assert own == "eager" or path in changed  # its forward was bound, so that it sees the kernel


def test_plan_and_receipt_say_what_a_proof_leaves_out():
    """Attention dropout of queries that see no key is not that of eager attention."""
    dropping = build("llama", attention_dropout=0.1, attn_implementation="eager")
    said = "attention:sdpa (1): queries that see no key give a mean of values without dropout"
    assert said in make_plan(dropping, ATTENTION).table()
    with bind(dropping, ATTENTION) as binding:
        assert f"Not proven: {said}" in binding.receipt.table()
        (entry,) = (op for op in binding.receipt.to_dict()["ops"] if op["op"] == "attention")
        assert entry["left_out"][0].startswith(said)
