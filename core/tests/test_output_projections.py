"""The output projection runs once, as the module that it is: hooks, wrappers, replacements, threads, transforms."""

from __future__ import annotations

import collections
import copy
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm
from transformers import PreTrainedModel

from counting_kernels import calls, counting_registry
from models import assert_equal_steps, build, step, tokens
from veomni_core import bind, binding_of, find_sites
from veomni_core.errors import BindingError, KernelUnavailableError, LogitsGoneError
from veomni_core.sites.forwards.deferred_logits import DeferredLogits

REGISTRY = counting_registry("one")
LOSS_ALONE = {"preset": "eager", "cross_entropy_loss_implementation": "one"}


def bound_and_eager(**options) -> tuple[PreTrainedModel, PreTrainedModel]:
    model, eager = build("llama"), build("llama")
    bind(model, {**LOSS_ALONE, **options}, registry=REGISTRY)
    return model, eager


def fused_losses() -> int:
    return calls[("cross_entropy_loss", "causal", "one")]


class NormalisedHead(nn.Linear):
    """Baichuan 2's."""

    def forward(self, x):
        return F.linear(x, F.normalize(self.weight, dim=-1))


class ScaledHead(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 3.0


class AdaptedHead(nn.Linear):
    """As loralib's linears are."""

    def __init__(self, *sizes, bias):
        super().__init__(*sizes, bias=bias)
        self.a, self.b = (nn.Parameter(0.1 * torch.randn(shape)) for shape in ((4, sizes[0]), (sizes[1], 4)))

    def forward(self, x):
        return super().forward(x) + x @ self.a.T @ self.b.T


@pytest.mark.parametrize("kind", [NormalisedHead, ScaledHead, AdaptedHead])
def test_a_head_with_a_forward_of_its_own_is_left_eager_and_refused_where_it_is_named(kind):
    model = build("llama")
    model.lm_head = kind(32, 64, bias=False)
    eager = copy.deepcopy(model)
    with pytest.raises(KernelUnavailableError, match=f"is a {kind.__name__}, whose forward is not torch's linear"):
        bind(model, LOSS_ALONE, registry=REGISTRY)
    bind(model, {"preset": "auto", "attn_implementation": "eager"}, registry=REGISTRY)
    assert_equal_steps(step(model), step(eager))
    assert not fused_losses()


def replaced_forward(head: nn.Module) -> None:
    head.forward = lambda x: F.linear(x, head.weight) * 2.0


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda model: replaced_forward(model.lm_head), "output projection was given a forward of its own"),
        (lambda model: spectral_norm(model.lm_head), "output projection's weight is parametrized"),
        (
            lambda model: setattr(model, "forward", lambda **inputs: None),
            "its forward was set on the instance",
        ),
    ],
    ids=["a forward on the head", "a parametrization", "a forward on the model"],
)
def test_what_was_replaced_before_bind_leaves_the_loss_eager(change, reason):
    model = build("llama")
    change(model)
    (site,) = [site for site in find_sites(model, REGISTRY) if site.op_name == "cross_entropy_loss"]
    assert site.variant is None and reason in site.evidence


FORWARD_HOOKS = {
    "halving": lambda module, inputs, logits: logits * 0.5,
    "dividing": lambda module, inputs, logits: logits / 2,
    "adding": lambda module, inputs, logits: logits + torch.arange(64.0) * 0.1,
    "in place": lambda module, inputs, logits: logits.mul_(0.5),
}


@pytest.mark.parametrize("hook", FORWARD_HOOKS.values(), ids=FORWARD_HOOKS)
def test_a_forward_hook_on_the_head_runs_once_on_the_logits(hook):
    model, eager = bound_and_eager()
    seen = []
    for each in (model, eager):
        each.lm_head.register_forward_hook(hook)
        each.lm_head.register_forward_hook(lambda module, inputs, logits: seen.append((type(inputs[0]), logits.shape)))
    assert_equal_steps(step(model), step(eager))
    assert seen == [(torch.Tensor, (2, 9, 64))] * 2


PRE_HOOKS = {
    "casting": lambda module, inputs: (inputs[0].to(module.weight.dtype),),
    "scaling": lambda module, inputs: (inputs[0] * 2.0,),
    "reading": lambda module, inputs: print(end="" if inputs[0].detach().numel() else " "),
}


@pytest.mark.parametrize("hook", PRE_HOOKS.values(), ids=PRE_HOOKS)
def test_a_pre_hook_on_the_head_gets_the_hidden_states(hook):
    model, eager = bound_and_eager()
    for each in (model, eager):
        each.lm_head.register_forward_pre_hook(hook)
    assert_equal_steps(step(model), step(eager))
    assert fused_losses() == 1


def test_a_hook_on_every_module_gets_tensors():
    model, eager = bound_and_eager()
    handle = register_module_forward_pre_hook(
        lambda module, inputs: (inputs[0].contiguous(),) if isinstance(module, nn.Linear) else None
    )
    try:
        assert_equal_steps(step(model), step(eager))
    finally:
        handle.remove()


def scaled_input_gradient(head: nn.Module) -> None:
    head.register_full_backward_hook(lambda module, inputs, outputs: tuple(g * 0.1 for g in inputs))


def clipped_output_gradient(head: nn.Module) -> None:
    head.register_full_backward_pre_hook(lambda module, outputs: tuple(g.clamp(-1e-3, 1e-3) for g in outputs))


@pytest.mark.parametrize("register", [scaled_input_gradient, clipped_output_gradient])
def test_a_backward_hook_on_the_head_gets_the_logits_gradient(register):
    model, eager = bound_and_eager()
    seen = []
    for each in (model, eager):
        register(each.lm_head)
        each.lm_head.register_full_backward_hook(lambda module, i, o: seen.append((i[0].shape, o[0].shape)))
    assert_equal_steps(step(model), step(eager))
    assert seen == [((2, 9, 32), (2, 9, 64))] * 2


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


class CastOutput(nn.Sequential):
    def forward(self, x):
        return super().forward(x).float()


def wrapped(model: PreTrainedModel) -> None:
    model.lm_head = CastOutput(model.lm_head)


REPLACEMENTS: dict[str, Callable[[PreTrainedModel], object]] = {
    "resized": lambda model: model.resize_token_embeddings(72, mean_resizing=False),
    "replaced": lambda model: model.set_output_embeddings(nn.Linear(32, 64, bias=False)),
    "wrapped": wrapped,
}


@pytest.mark.parametrize("change", REPLACEMENTS.values(), ids=REPLACEMENTS)
def test_what_takes_the_head_s_place_is_fused_too_and_left_as_it_came(change):
    model, eager = bound_and_eager()
    for each in (model, eager):
        torch.manual_seed(5)
        change(each)
    assert_equal_steps(step(model), step(eager))
    assert fused_losses() == 1
    binding_of(model).undo()
    assert all(type(module).forward is nn.Linear.forward for module in model.modules() if type(module) is nn.Linear)
    assert isinstance(model.lm_head, CastOutput) or type(model.lm_head) is nn.Linear


@pytest.mark.parametrize("saved", [["lm_head"], ["norm", "lm_head"]], ids=str)
def test_a_copy_of_the_head_that_peft_trains_is_fused_with_its_own_weight(saved):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=saved, task_type="CAUSAL_LM")
    models = []
    for model in bound_and_eager():
        torch.manual_seed(7)
        model = peft.get_peft_model(model, config)
        model.get_output_embeddings().weight.data.mul_(1.5)
        models.append(model)
    assert_equal_steps(*[step(model) for model in models])
    assert fused_losses() == 1


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, weight):
        self.calls += 1
        return weight * 2.0


def test_a_parametrization_after_bind_is_computed_once_a_step():
    model, eager = bound_and_eager()
    counters = [Counting(), Counting()]
    for each, counter in zip((model, eager), counters, strict=True):
        parametrize.register_parametrization(each.lm_head, "weight", counter)
        counter.calls = 0
    assert_equal_steps(step(model), step(eager))
    assert [counter.calls for counter in counters] == [1, 1]


def test_accelerate_s_autocast_leaves_the_logits_uncomputed_and_its_unwrapping_the_kernel():
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # a trainer's, of another test
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    model, _ = bound_and_eager()
    ids = tokens()
    output = accelerator.prepare_model(model)(input_ids=ids, labels=ids)
    output.loss.backward()
    assert fused_losses() == 1
    accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    step(model)
    assert fused_losses() == 2
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


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
