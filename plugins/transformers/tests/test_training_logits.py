"""The logits of a bound model: to its own loss functions, in threads and modes, and as the config says."""

from __future__ import annotations

import collections
import threading

import pytest
import torch
from fused_head import LOSS_ALONE, REGISTRY, bound_and_eager
from torch.nn import functional as F
from transformers import PreTrainedModel

from models import assert_equal_steps, build, step, tokens
from veomni_core import bind, binding_of
from veomni_core.errors import BindingError, LogitsGoneError
from veomni_transformers.forwards.deferred_logits import DeferredLogits


def smoothed(logits, labels, vocab_size, **kwargs):
    flat = logits.float()[:, :-1].reshape(-1, vocab_size)
    return F.cross_entropy(flat, labels[:, 1:].reshape(-1), label_smoothing=0.1)


def tempered(logits, labels, vocab_size, **kwargs):
    logits = logits.float()
    logits.mul_(2.0)
    return F.cross_entropy(logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].reshape(-1))


def with_one_logit(logits, labels, vocab_size, **kwargs):
    flat = logits[:, :-1].reshape(-1, vocab_size)
    return F.cross_entropy(flat, labels[:, 1:].reshape(-1)) + logits[0, 1, 2, ...]


@pytest.mark.parametrize("loss", [smoothed, tempered, with_one_logit])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_loss_function_of_one_s_own_gets_the_logits_in_the_dtype_it_asks_for(loss, dtype):
    model, eager = build("llama", dtype=dtype), build("llama", dtype=dtype)
    bind(model, LOSS_ALONE, registry=REGISTRY)
    model.loss_function = eager.loss_function = loss
    (found, _), (wanted, _) = step(model), step(eager)
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found, wanted, rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=0)


def test_a_loss_that_ran_as_the_model_s_own_is_told_once_and_in_the_receipt(caplog):
    model, _ = bound_and_eager()
    binding = binding_of(model)
    step(model)
    assert not binding.receipt.changed
    model.loss_function = smoothed
    step(model)
    step(model)
    assert [r.message for r in caplog.records if "logits were needed before" in r.message] == [
        f"the loss runs its own code in such a step: {binding.receipt.changed['the loss']}"
    ]
    assert "Changed since: the loss: the logits were needed" in binding.receipt.table()


def test_a_compiled_step_that_runs_the_model_s_own_loss_is_in_the_receipt():
    torch._dynamo.reset()
    model, eager = bound_and_eager()
    model.loss_function = eager.loss_function = smoothed
    model.compile(backend="aot_eager", fullgraph=True)
    assert_equal_steps(step(model), step(eager))
    assert "logits were needed" in binding_of(model).receipt.changed["the loss"]


def test_a_forward_without_labels_in_another_thread_gets_logits():
    model, _ = bound_and_eager()
    ids, kinds, stop = tokens(), collections.Counter(), threading.Event()

    def train() -> None:
        while not stop.is_set():
            model(input_ids=ids, labels=ids, use_cache=False)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        for _ in range(30):
            kinds[type(model(input_ids=ids, use_cache=False).logits)] += 1
    finally:
        stop.set()
        thread.join()
    assert kinds == {torch.Tensor: 30}


def test_a_teacher_in_no_grad_trains_nothing():
    def distilled(model: PreTrainedModel):
        ids = tokens()
        model.zero_grad()
        output = model(input_ids=ids, labels=ids)
        with torch.no_grad():
            teacher = model(input_ids=ids, labels=ids)
        target = F.softmax(teacher.logits / 0.5, -1)
        (output.loss + F.kl_div(F.log_softmax(output.logits, -1), target, reduction="batchmean")).backward()
        return output.loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}

    assert_equal_steps(*map(distilled, bound_and_eager()))


def test_inference_mode_gives_plain_logits():
    model, eager = bound_and_eager()
    ids = tokens()
    with torch.inference_mode():
        found, wanted = model(input_ids=ids, labels=ids), eager(input_ids=ids, labels=ids)
    assert type(found.logits) is torch.Tensor
    torch.testing.assert_close(found.logits, wanted.logits)


def test_torch_func_is_refused_with_the_way_out():
    model, _ = bound_and_eager()
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(values):
        return torch.func.functional_call(model, values, (), {"input_ids": tokens(), "labels": tokens()}).loss

    with pytest.raises(BindingError, match=r"torch.func's transforms .* Call binding_of\(model\).undo\(\) first"):
        torch.func.grad(loss)(parameters)


def test_a_training_step_exports():
    model, _ = bound_and_eager()
    ids = tokens()
    exported = torch.export.export(model, (), {"input_ids": ids, "labels": ids, "use_cache": False}, strict=False)
    torch.testing.assert_close(exported.module()(input_ids=ids, labels=ids, use_cache=False).loss, step(model)[0])


@pytest.mark.thorough(one_per=["compiled"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("setting", ["deferred", "computed", "none"])
def test_training_logits_are_what_the_config_says(setting, compiled):
    torch._dynamo.reset()
    model, eager = bound_and_eager(training_logits=setting)
    ids = tokens()
    step(model)
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    found, wanted = run(input_ids=ids, labels=ids, use_cache=False), eager(input_ids=ids, labels=ids)
    torch.testing.assert_close(found.loss, wanted.loss)
    assert not binding_of(model).receipt.changed
    if setting == "none" or (compiled and setting == "deferred"):
        assert found.logits is None
        return
    if not compiled:
        assert isinstance(found.logits, DeferredLogits) and (found.logits.computed is None) == (setting == "deferred")
    if setting == "computed":
        with torch.no_grad():
            model.lm_head.weight.zero_()
    torch.testing.assert_close(found.logits + 0, wanted.logits)


def test_reading_them_after_the_optimizer_s_step_is_refused_with_the_ways_out():
    model, _ = bound_and_eager()
    output = model(input_ids=tokens(), labels=tokens())
    output.loss.backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    with pytest.raises(LogitsGoneError, match=r"was changed since.*or write `training_logits: computed`"):
        output.logits.argmax(-1)
