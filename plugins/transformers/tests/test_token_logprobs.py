"""``token_logprobs``: a bound model gives what its own logits give, without all of them."""

from __future__ import annotations

import pytest
import torch
from own_logprobs import ALONE, FIELD, own_logprobs
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from counting_kernels import calls, counting_registry
from models import build, tokens
from veomni_core import bind, token_logprobs
from veomni_ops.token_logprobs import ENTROPY, LOGPROBS, OUTPUTS

FAMILIES = {
    "llama": {},
    "tied": {"tie_word_embeddings": True},
    "gemma2": {"final_logit_softcapping": 3.0},
    "granite": {"logits_scaling": 4.0},
    "cohere": {"logit_scale": 0.3},
    "qwen3_moe": {},
    "gpt_neox": {},
}


def family(name, **options):
    return build("llama" if name == "tied" else name, **{**FAMILIES[name], **options})


def gradients(model, *results):
    model.zero_grad()
    sum((result * torch.linspace(-1, 2, result.numel()).view_as(result)).sum() for result in results).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_gradients_close(found, wanted, relative=1e-5):
    assert found.keys() == wanted.keys()
    size = torch.stack([each.norm() for each in wanted.values()]).norm()
    for name, gradient in wanted.items():
        assert (found[name] - gradient).norm() <= relative * size, name


@pytest.mark.parametrize("name", FAMILIES)
def test_a_bound_model_gives_what_its_own_logits_give(name):
    model, eager, ids = family(name), family(name), tokens(2, 9)
    with bind(model, ALONE) as binding:
        assert [str(planned.spec) for planned in binding.plan.kernels] == ["token_logprobs/causal:chunk_logprobs"]
        scored = token_logprobs(model, ids, outputs=(LOGPROBS, ENTROPY), temperature=0.7)
        wanted = own_logprobs(eager, ids, ids[:, 1:], temperature=0.7)
        torch.testing.assert_close((scored.logprobs, scored.entropy), wanted)
        found = gradients(model, scored.logprobs, scored.entropy)
        assert_gradients_close(found, gradients(eager, *wanted))
        assert not binding.receipt.changed
    assert torch.equal(model(ids).logits, eager(ids).logits)


class Largest(TorchDispatchMode):
    """The most numbers in a tensor that an operator gave."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():  # as autograd calls operators; Python's calls read a gradient
            result = function(*args, **(kwargs or {}))
        if type(result) in (torch.Tensor, nn.Parameter) and not result.is_meta:
            self.numbers = max(self.numbers, result.numel())
        return result


def test_no_tensor_has_the_size_of_all_logits(monkeypatch):
    monkeypatch.setattr("veomni_torch.token_logprobs._CPU_TILE_BYTES", 4 * 128 * 64)
    model, ids = build("llama", vocab_size=1031), tokens(4, 33)
    of_logits = 4 * 32 * 1031
    with Largest() as unbound:
        token_logprobs(model, ids).logprobs.sum().backward()
    bind(model, ALONE)
    with Largest() as bound:
        token_logprobs(model, ids).logprobs.sum().backward()
    assert unbound.numbers >= of_logits > 2 * bound.numbers


def test_the_labels_are_the_tokens_unless_others_are_given():
    model, ids = build("llama"), tokens(2, 9)
    bind(model, ALONE)
    labels = ids.clone()
    labels[:, :4] = -100
    shifted = F.pad(labels[:, 1:], (0, 1), value=-100)
    by_tokens, by_labels = token_logprobs(model, ids).logprobs, token_logprobs(model, ids, labels=labels).logprobs
    assert by_tokens.shape == by_labels.shape == (2, 8)
    assert torch.equal(by_labels, torch.where(labels[:, 1:] == -100, 0.0, by_tokens))
    by_shifted = token_logprobs(model, ids, shift_labels=shifted).logprobs
    assert torch.equal(by_shifted, F.pad(by_labels, (0, 1)))


def test_padding_embeddings_and_every_output():
    model, eager, ids = build("llama"), build("llama"), tokens(2, 9)
    bind(model, ALONE)
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0
    temperature = torch.rand(2, 8) + 0.5
    embedded = model.get_input_embeddings()(ids).detach()
    given = {"labels": ids, "inputs_embeds": embedded, "attention_mask": mask, "temperature": temperature}
    found, wanted = (token_logprobs(each, outputs=OUTPUTS, **given) for each in (model, eager))
    for name in OUTPUTS:
        torch.testing.assert_close(getattr(found, name), getattr(wanted, name))
    logprobs, entropy = own_logprobs(eager, ids, ids[:, 1:], temperature.unsqueeze(2), attention_mask=mask)
    torch.testing.assert_close((found.logprobs, found.entropy), (logprobs, entropy))


def test_the_output_is_the_models_with_its_auxiliary_loss_and_logits_for_who_reads_them():
    model, eager, ids = build("qwen3_moe"), build("qwen3_moe"), tokens(2, 9)
    bind(model, ALONE)
    scored = token_logprobs(model, ids, output_router_logits=True)
    wanted = eager(ids, output_router_logits=True)
    torch.testing.assert_close(scored.output.aux_loss, wanted.aux_loss)
    torch.testing.assert_close(scored.output.logits + 0, wanted.logits)


def test_logits_that_are_read_before_the_backward_give_the_same_gradients():
    model, eager, ids = build("llama"), build("llama"), tokens(2, 9)
    bind(model, ALONE)
    model.lm_head.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 2, *inputs[1:]))
    eager.lm_head.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 2, *inputs[1:]))
    scored = token_logprobs(model, ids, outputs=(LOGPROBS, ENTROPY))
    wanted = own_logprobs(eager, ids, ids[:, 1:])
    assert_gradients_close(gradients(model, scored.logprobs, scored.entropy), gradients(eager, *wanted))


@pytest.mark.parametrize("changed", ["read", "scaled"])
def test_a_gradient_that_a_hook_reads_or_changes(changed):
    """Then the gradient of the logits is computed, and is that of the results."""
    found = {}
    for name, model in (("bound", build("llama")), ("eager", build("llama"))):
        if name == "bound":
            bind(model, ALONE)

        def hook(module, outputs, name=name):
            found[name] = outputs[0].detach() + 0
            return (outputs[0] * 3,) if changed == "scaled" else None

        model.lm_head.register_full_backward_pre_hook(hook)
        labels = tokens(2, 9)
        labels[0, :4] = -100
        scored = token_logprobs(model, tokens(2, 9), labels=labels, outputs=(ENTROPY, LOGPROBS), temperature=0.7)
        found[f"{name} all"] = gradients(model, scored.entropy, scored.logprobs)
    torch.testing.assert_close(found["bound"], found["eager"])
    assert_gradients_close(found["bound all"], found["eager all"])


def test_without_gradients_and_in_evaluation_too_the_kernel_runs():
    registry = counting_registry("one")
    model, ids = build("llama"), tokens(2, 9)
    eager = own_logprobs(build("llama"), ids, ids[:, 1:])[0]
    bind(model, {"preset": "eager", FIELD: "one"}, registry=registry)
    before = calls[("token_logprobs", "causal", "one")]
    with torch.no_grad():
        torch.testing.assert_close(token_logprobs(model, ids).logprobs, eager)
    with torch.inference_mode():
        torch.testing.assert_close(token_logprobs(model.eval(), ids).logprobs, eager)
    assert calls[("token_logprobs", "causal", "one")] == before + 2
    model(ids, labels=ids)  # a forward of its own doesn't ask for them
    assert calls[("token_logprobs", "causal", "one")] == before + 2


def test_beside_a_fused_loss():
    model, eager, ids = build("llama"), build("llama"), tokens(2, 9)
    bind(model, {**ALONE, "cross_entropy_loss_implementation": "chunk_loss"})
    loss = model(ids, labels=ids).loss
    scored = token_logprobs(model, ids)
    torch.testing.assert_close(-scored.logprobs.mean(), loss)
    (loss + scored.logprobs.sum()).backward()
    wanted = eager(ids, labels=ids).loss + own_logprobs(eager, ids, ids[:, 1:])[0].sum()
    wanted.backward()
    for (name, found), expected in zip(model.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_under_autocast_and_with_bf16_weights():
    ids = tokens(2, 9)
    for model, eager in ((build("llama"), build("llama")), *[[build("llama", dtype=torch.bfloat16) for _ in "ab"]]):
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=model.dtype == torch.float32)
        bind(model, ALONE, autocast="bfloat16" if model.dtype == torch.float32 else None)
        with autocast:
            scored, wanted = token_logprobs(model, ids), own_logprobs(eager, ids, ids[:, 1:])[0]
        assert scored.logprobs.dtype == torch.float32
        torch.testing.assert_close(scored.logprobs, wanted, rtol=2e-2, atol=2e-2)
        assert_gradients_close(gradients(model, scored.logprobs), gradients(eager, wanted), 4e-2)


def test_what_can_t_be_scored_is_an_error():
    model, ids = build("llama"), tokens(2, 9)
    bind(model, ALONE)
    beyond = ids.clone()
    beyond[1, 3] = 64
    with pytest.raises(ValueError, match="label 64 is not in the vocabulary of 64 words; positions that don't count"):
        token_logprobs(model, ids, labels=beyond)
    with pytest.raises(ValueError, match="labels or shift_labels, not both"):
        token_logprobs(model, ids, labels=ids, shift_labels=ids)
    with pytest.raises(ValueError, match="needs labels, shift_labels or input_ids"):
        token_logprobs(model, inputs_embeds=torch.zeros(1, 3, 32))
    with pytest.raises(ValueError, match=r"labels for \(2, 4\) positions don't fit logits of \(2, 9\)"):
        token_logprobs(model, ids, shift_labels=ids[:, :4])
    for temperature in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="temperature is .*, expected a number above 0"):
            token_logprobs(model, ids, temperature=temperature)
    with pytest.raises(ValueError, match=r"temperature has shape \(2, 9\), expected \(2, 8\)"):
        token_logprobs(model, ids, temperature=torch.ones(2, 9))
    with pytest.raises(ValueError, match="outputs is .*, expected names of logprobs, entropy"):
        token_logprobs(model, ids, outputs=("perplexity",))


def test_logits_that_are_not_numbers_give_results_that_are_none():
    model, ids = build("llama"), tokens(2, 9)
    bind(model, ALONE)
    with torch.no_grad():
        model.lm_head.weight[5] = float("nan")
    scored = token_logprobs(model, ids, outputs=(LOGPROBS, ENTROPY))
    assert scored.logprobs.isnan().all() and scored.entropy.isnan().all()
